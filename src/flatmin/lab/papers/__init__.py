"""Publications whose experiments can be run again, one module each."""
