-- Which workloads drift? Accepted length and the error of what was expected, over time, in forty
-- equal stretches of it.
WITH span AS (SELECT min(time) AS began, greatest(max(time) - min(time), 1e-6) AS long FROM cycles)
SELECT
  kind AS workload,
  began + long / 40 * (least(floor((time - began) / long * 40), 39) + 0.5) AS moment,
  count(*) AS drafts,
  avg(accepted) AS accepted,
  avg(abs(predicted - accepted)) AS error
FROM cycles, span
WHERE known AND own
GROUP BY kind, moment
ORDER BY kind, moment;
