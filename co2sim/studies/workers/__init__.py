"""What runs the cases of a study: processes of this machine, or Dask."""
