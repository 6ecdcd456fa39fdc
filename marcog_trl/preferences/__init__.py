"""Learning from preferences: pairs of episodes, MADPO, reward models of teams, and rounds of them."""
