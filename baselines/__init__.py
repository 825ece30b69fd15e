"""Other people's methods as policies over aspire; README.md names source, parameter, our value and deviation."""
