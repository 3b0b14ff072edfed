"""Makes pytest add this folder, with ``made_records``, to the path of its subfolders."""
