"""What results say: comparisons, tests, tables, figures and exports.

``stores`` opens files of results as ``results``, which ``columns``, ``tables`` and ``wording`` show; ``compare`` finds the
best settings and tests differences, ``variants`` tells the variants of a method apart, ``bands`` and ``figures`` draw curves,
``layout`` sets tables and ``exports`` writes CSV and Parquet.
"""
