"""For people to read: the pictures and the page of a run, and tables on the console."""
