"""What makes training fast on a CPU: the form of each network that suits its devices. Skip it at first."""
