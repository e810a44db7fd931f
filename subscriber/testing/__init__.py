"""What users need to test with the subscriber: embedded servers, load, fault points."""
