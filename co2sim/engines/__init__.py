"""What runs the cases of a study: processes of this machine, Dask, or Ray."""
