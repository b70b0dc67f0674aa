-- Where does cache drafting pay? Over every cache draft whose accepted length is known, chosen or
-- not: tokens in the time of a plain cycle, had each been verified whole; the same of model drafts
-- where those were verified. Above 1 is faster than no draft.
SELECT
  CASE WHEN grouping(kind) = 0 THEN 'workload' WHEN grouping(matched) = 0 THEN 'match, up to'
    ELSE 'batch, up to' END AS what,
  coalesce(kind, matched::VARCHAR, batch::VARCHAR) AS value,
  count(*) AS drafts,
  avg(draft_len) AS proposed,
  avg(accepted) AS accepted,
  avg((accepted >= 6)::INT) AS six_or_more,
  sum(1 + accepted) / sum(1 + draft_len * token_us / plain_us) AS cache_pays,
  sum(1 + model_accepted) / sum(model_us / plain_us) FILTER (model_accepted IS NOT NULL) AS model_pays
FROM cycles JOIN costs USING (scope, batch)
WHERE known
GROUP BY GROUPING SETS ((kind), (matched), (batch))
ORDER BY what DESC, coalesce(matched, batch), drafts DESC;
