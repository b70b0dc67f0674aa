-- Regret by arm. A token is worth the time that one took in this scope, all cycles together. What a
-- choice brings is its tokens at that worth less its cost. The best in hindsight is the best of no
-- draft, the cache draft cut where it stopped being accepted, and the model draft where it was
-- verified. Regret is how much more that would have brought: nobody who chooses beforehand reaches 0.
WITH worth AS (
  SELECT scope, sum(request_us) / sum(committed) AS token_worth FROM cycles WHERE own GROUP BY scope
),
brought AS (
  SELECT
    arm, request_us, token_worth - plain_us AS none_brings,
    (1 + accepted) * token_worth - (plain_us + accepted * token_us) AS cache_brings,
    CASE WHEN model_accepted IS NOT NULL
      THEN (1 + model_accepted) * token_worth - model_us END AS model_brings,
    CASE
      WHEN arm = 'cache' THEN committed * token_worth - (plain_us + verified_len * token_us)
      WHEN arm = 'model' AND model_accepted IS NOT NULL THEN committed * token_worth - model_us
      ELSE token_worth - plain_us
    END AS brings
  FROM cycles JOIN costs USING (scope, batch) JOIN worth USING (scope)
  WHERE own AND known AND arm IN ('cache', 'model', 'none')
),
best AS (
  SELECT *, greatest(none_brings, cache_brings, coalesce(model_brings, none_brings)) AS best
  FROM brought
)
SELECT
  coalesce(arm, 'all') AS chosen,
  count(*) AS cycles,
  avg(best - brings) AS regret_us,
  sum(best - brings) / sum(request_us) AS share_of_time,
  avg((best - brings < 1)::INT) AS was_best,
  avg((cache_brings >= best AND cache_brings > none_brings)::INT) AS cache_was_best,
  avg((none_brings >= best)::INT) AS none_was_best
FROM best
GROUP BY GROUPING SETS ((arm), ())
ORDER BY grouping(arm), cycles DESC;
