"""Public test tools: a store without a daemon, fake devices, contract suites, a daemon as a child process."""
