-- One row for each decoding cycle, with the words that the questions below use. Lengths are tokens,
-- times microseconds. A step's time belongs to its requests together, to each as much.
CREATE OR REPLACE VIEW cycles AS
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
