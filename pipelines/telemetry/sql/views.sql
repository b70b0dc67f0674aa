-- The events of an export, each once: of the files that the note in this folder names. Exports of
-- before have no share: none of their requests was shed, and it is 1.
SET VARIABLE files = (SELECT from_json(content -> 'files', '["VARCHAR"]') FROM read_text('export.json'));
CREATE OR REPLACE TEMP VIEW drafts AS
SELECT DISTINCT ON (life, number) * REPLACE (coalesce(share, 1.0) AS share) FROM (
  FROM read_parquet(getvariable('files'), union_by_name = true)
  UNION ALL BY NAME SELECT 1.0::DOUBLE AS share WHERE false
);

-- One row for each decoding cycle, with the words that the questions below use. Lengths are tokens,
-- times microseconds. A step's time belongs to its requests together, to each as much.
CREATE OR REPLACE TEMP VIEW cycles AS
SELECT
  *,
  coalesce(nullif(workload, ''), '-') AS kind,
  side IN ('', 'champion') AS own,               -- the policy in force decided
  draft_len > 0 AND censored = '' AS known,      -- what of the cache draft would have been accepted
  step_us / batch_size AS request_us,
  1 + CASE arm
    WHEN 'cache' THEN least(accepted, verified_len)
    WHEN 'model' THEN coalesce(model_accepted, 0)
    ELSE 0
  END AS committed,
  (2 ** ceil(log2(batch_size)))::BIGINT AS batch, -- requests in the step, up to
  (2 ** ceil(log2(greatest(step_tokens, 1))))::BIGINT AS tokens,
  (2 ** ceil(log2(greatest(feature_match_len, 1))))::BIGINT AS matched
FROM drafts;

-- What a cycle costs, by size of the batch. A step takes a time of its own, which its requests share,
-- and each token more that it verifies another: least squares over steps in which no model draft was
-- chosen, those of more than three times the usual left out. With a model draft: the median share.
CREATE OR REPLACE TEMP VIEW costs AS
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
