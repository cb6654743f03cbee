"""What is captured: catalog, configuration and lake combined."""
