"""Analysis of results: comparisons, tests, tables, figures and exports.

``stores`` opens files of results as ``results``, which ``columns``, ``tables`` and ``wording`` present; ``compare`` finds the
best settings and tests differences, ``variants`` distinguishes the variants of a method, ``bands`` and ``figures`` draw
curves, ``layout`` formats tables, and ``exports`` writes CSV and Parquet.
"""
