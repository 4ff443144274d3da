"""The `linattn` command as the terminal shows it, one file per subcommand."""
