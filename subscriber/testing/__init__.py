"""Tools for tests with the subscriber: embedded servers, load, compliance tests, comparison."""
