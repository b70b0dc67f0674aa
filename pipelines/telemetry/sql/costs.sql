-- What a cycle costs, by size of the batch. A step takes a time of its own, which its requests share,
-- and each token more that it verifies another: least squares over steps in which no model draft was
-- chosen, those of more than three times the usual left out. With a model draft: the median share.
CREATE OR REPLACE VIEW costs AS
WITH timed AS (
  SELECT
    scope, batch, arm, batch_size, step_tokens, step_us, request_us,
    median(step_us) OVER (PARTITION BY scope, batch, arm) AS usual
  FROM cycles
  WHERE step_us > 0
),
fitted AS (
  SELECT
    scope, batch, count(*) AS cycles, avg(step_us) AS us, avg(batch_size) AS requests,
    avg(step_tokens) - avg(batch_size) AS more,
    greatest(coalesce(nullif(regr_slope(step_us, step_tokens), 'nan'), 0), 0) AS slope
  FROM timed
  WHERE arm <> 'model' AND step_us <= 3 * usual
  GROUP BY scope, batch
),
models AS (
  SELECT scope, batch, median(request_us) AS model_us
  FROM timed WHERE arm = 'model' GROUP BY scope, batch
)
SELECT
  scope, batch, cycles, model_us,
  CASE WHEN slope * more < us THEN slope ELSE 0 END AS token_us,
  (CASE WHEN slope * more < us THEN us - slope * more ELSE us END) / requests AS plain_us
FROM fitted LEFT JOIN models USING (scope, batch);
