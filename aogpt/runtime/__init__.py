"""What any script needs around the model: processes, devices, files, reports, the
command line."""
