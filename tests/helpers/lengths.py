"""A reward by which replies of a model that solves nothing can be told apart."""


def lengths(completions, replies, **kwargs):
    return [sum(map(len, of_episode.values())) / 10 for of_episode in replies]
