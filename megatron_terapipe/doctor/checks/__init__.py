"""What is wrong, by facts alone: each function yields a finding for everything that it looked at."""
