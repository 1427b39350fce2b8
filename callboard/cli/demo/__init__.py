"""Where the demonstration's workers were in version 0.1: job files and journals of that version name them."""
