"""Ray Serve applications, engines and the command line."""
