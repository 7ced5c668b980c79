"""Commands whose bodies are more than a few lines, one file each; kvlib.cli lists them."""
