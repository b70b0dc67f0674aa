-- Cost by batch: the median step, by its requests, what it verified, and how many tokens it ran.
SELECT
  scope, batch, arm, tokens,
  count(*) AS cycles,
  median(step_us) / 1e3 AS step_ms,
  median(draft_us) / 1e3 AS draft_ms,
  sum(committed) / sum(request_us) * 1e6 AS tokens_a_second
FROM cycles
WHERE step_us > 0
GROUP BY scope, batch, arm, tokens
HAVING count(*) >= 10
ORDER BY scope, batch, arm, tokens;
