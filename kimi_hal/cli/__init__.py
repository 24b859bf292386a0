"""The command line. Each command is a file; none is imported before it is asked for."""
