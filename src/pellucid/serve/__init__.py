"""The trained model over HTTP: requests that arrive together are decoded together."""
