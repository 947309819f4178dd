"""Work on the machine where the files lie: our sources travel over the user's ssh, the answer comes back, nothing stays there."""
