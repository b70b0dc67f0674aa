"""From a cache draft and its request's history to the numbers the policy decides on."""
