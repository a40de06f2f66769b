"""Small functions about numbers, text and dates that people ask for first, each with its sentence. They are training text."""

import math
from collections import Counter
from datetime import date, timedelta


def add(a, b):
    """Return the sum of two numbers."""
    return a + b


def subtract(a, b):
    """Return the difference of two numbers."""
    return a - b


def multiply(a, b):
    """Return the product of two numbers."""
    return a * b


def divide(a, b):
    """Divide two numbers and raise ValueError if the divisor is zero."""
    if b == 0:
        raise ValueError("cannot divide by zero")
    return a / b


def square(x):
    """Return the square of a number."""
    return x * x


def is_even(n):
    """Check whether a number is even."""
    return n % 2 == 0


def is_odd(n):
    """Check whether a number is odd."""
    return n % 2 == 1


def factorial(n):
    """Compute the factorial of a number."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def factorial_recursive(n):
    """Compute the factorial of a number recursively."""
    if n <= 1:
        return 1
    return n * factorial_recursive(n - 1)


def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def fibonacci_list(n):
    """Return a list of the first n Fibonacci numbers."""
    numbers = []
    a, b = 0, 1
    for _ in range(n):
        numbers.append(a)
        a, b = b, a + b
    return numbers


def is_prime(n):
    """Check whether a number is prime."""
    if n < 2:
        return False
    for i in range(2, int(n**0.5) + 1):  # noqa: SIM110
        if n % i == 0:
            return False
    return True


def primes_up_to(n):
    """Return all prime numbers up to n with the sieve of Eratosthenes."""
    sieve = [True] * (n + 1)
    primes = []
    for i in range(2, n + 1):
        if sieve[i]:
            primes.append(i)
            for j in range(i * i, n + 1, i):
                sieve[j] = False
    return primes


def prime_factors(n):
    """Return the prime factors of a number."""
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def gcd(a, b):
    """Compute the greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """Compute the least common multiple of two numbers."""
    return a * b // math.gcd(a, b)


def power(base, exponent):
    """Raise a number to a power by repeated squaring."""
    result = 1
    while exponent > 0:
        if exponent % 2 == 1:
            result *= base
        base *= base
        exponent //= 2
    return result


def reverse_string(text):
    """Reverse a string."""
    return text[::-1]


def is_palindrome(text):
    """Check whether a string is a palindrome."""
    cleaned = "".join(c.lower() for c in text if c.isalnum())
    return cleaned == cleaned[::-1]


def count_vowels(text):
    """Count the vowels in a string."""
    return sum(1 for c in text.lower() if c in "aeiou")


def count_words(text):
    """Count the words in a text."""
    return len(text.split())


def word_frequencies(text):
    """Count how often each word occurs in a text."""
    return Counter(text.lower().split())


def character_counts(text):
    """Count how often each character occurs in a string."""
    counts = {}
    for c in text:
        counts[c] = counts.get(c, 0) + 1
    return counts


def most_common_word(text):
    """Return the most common word in a text."""
    counts = Counter(text.lower().split())
    return counts.most_common(1)[0][0]


def longest_word(text):
    """Return the longest word in a text."""
    return max(text.split(), key=len)


def capitalize_words(text):
    """Capitalize every word in a string."""
    return " ".join(word.capitalize() for word in text.split())


def are_anagrams(a, b):
    """Check whether two strings are anagrams."""
    return sorted(a.lower()) == sorted(b.lower())


def remove_vowels(text):
    """Remove all vowels from a string."""
    return "".join(c for c in text if c.lower() not in "aeiou")


def caesar_cipher(text, shift):
    """Encrypt a text with the Caesar cipher."""
    result = []
    for c in text:
        if c.isalpha():
            base = ord("A") if c.isupper() else ord("a")
            result.append(chr((ord(c) - base + shift) % 26 + base))
        else:
            result.append(c)
    return "".join(result)


def maximum(numbers):
    """Find the largest number in a list."""
    largest = numbers[0]
    for number in numbers[1:]:
        if number > largest:
            largest = number
    return largest


def minimum(numbers):
    """Find the smallest number in a list."""
    smallest = numbers[0]
    for number in numbers[1:]:
        if number < smallest:
            smallest = number
    return smallest


def second_largest(numbers):
    """Find the second largest number in a list."""
    return sorted(set(numbers))[-2]


def mean(numbers):
    """Compute the average of a list of numbers."""
    return sum(numbers) / len(numbers)


def median(numbers):
    """Compute the median of a list of numbers."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def variance(numbers):
    """Compute the variance of a list of numbers."""
    average = sum(numbers) / len(numbers)
    return sum((x - average) ** 2 for x in numbers) / len(numbers)


def sum_of_list(numbers):
    """Return the sum of all numbers in a list."""
    total = 0
    for number in numbers:
        total += number
    return total


def sum_of_digits(n):
    """Compute the sum of the digits of a number."""
    return sum(int(digit) for digit in str(abs(n)))


def fizz_buzz(n):
    """Return the FizzBuzz sequence up to n."""
    result = []
    for i in range(1, n + 1):
        if i % 15 == 0:
            result.append("FizzBuzz")
        elif i % 3 == 0:
            result.append("Fizz")
        elif i % 5 == 0:
            result.append("Buzz")
        else:
            result.append(str(i))
    return result


def to_binary(n):
    """Convert a number to binary."""
    return bin(n)[2:]


def from_binary(text):
    """Convert a binary string to a number."""
    return int(text, 2)


def celsius_to_fahrenheit(celsius):
    """Convert a temperature from Celsius to Fahrenheit."""
    return celsius * 9 / 5 + 32


def fahrenheit_to_celsius(fahrenheit):
    """Convert a temperature from Fahrenheit to Celsius."""
    return (fahrenheit - 32) * 5 / 9


def circle_area(radius):
    """Compute the area of a circle."""
    return math.pi * radius**2


def distance(a, b):
    """Compute the distance between two points."""
    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)


def is_leap_year(year):
    """Check whether a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_between(first, second):
    """Return the number of days between two dates."""
    return abs((second - first).days)


def tomorrow():
    """Return the date of tomorrow."""
    return date.today() + timedelta(days=1)
