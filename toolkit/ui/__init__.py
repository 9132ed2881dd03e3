"""What people see of a run: progress, metrics files, loggers, plots. Takes plain values; imports no torch by itself."""
