"""What a file, data set, checkpoint or capture is and holds."""
