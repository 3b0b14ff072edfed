"""Is here so that pytest puts this folder, and with it ``made_records``, on the path of the folders below."""
