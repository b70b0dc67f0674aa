-- Which workloads drift? The last third of the drafts of each against the first: a difference of
-- more than three standard errors is one that chance does not make (drafts of a request are alike,
-- so take it as a hint).
WITH thirds AS (
  SELECT kind, accepted, abs(predicted - accepted) AS error,
    ntile(3) OVER (PARTITION BY kind ORDER BY time) AS third
  FROM cycles WHERE known AND own
),
means AS (
  SELECT kind, count(*) AS drafts,
    avg(accepted) FILTER (third = 1) AS accepted_first,
    avg(accepted) FILTER (third = 3) AS accepted_last,
    avg(error) FILTER (third = 1) AS error_first,
    avg(error) FILTER (third = 3) AS error_last,
    sqrt((var_samp(accepted) FILTER (third = 1) + var_samp(accepted) FILTER (third = 3)) / (count(*) / 3)) AS se
  FROM thirds GROUP BY kind
)
SELECT kind AS workload, drafts, accepted_first, accepted_last, error_first, error_last,
  (accepted_last - accepted_first) / nullif(se, 0) AS standard_errors
FROM means WHERE drafts >= 30
ORDER BY abs(coalesce(standard_errors, 0)) DESC;
