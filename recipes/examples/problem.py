def solve(numbers):
    """First square each number, then put 7 in front.

    >>> solve([1, 9, 11, 4, 4])
    [7, 1, 81, 121, 16, 16]
    """


assert solve([1, 9, 11, 4, 4]) == [7, 1, 81, 121, 16, 16]
assert solve([7, 10, 7, 1, 1, 4]) == [7, 49, 100, 49, 1, 1, 16]
