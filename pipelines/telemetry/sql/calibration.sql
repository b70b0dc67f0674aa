-- What was expected and what came, by tenths of what was expected: of every cache draft whose label
-- is known, and of the model drafts that were verified.
WITH said AS (
  SELECT 'cache' AS arm, predicted AS expected, accepted AS came FROM cycles WHERE known AND own
  UNION ALL
  SELECT 'model', predicted_model, model_accepted FROM cycles
  WHERE own AND model_accepted IS NOT NULL AND censored = ''
),
tenths AS (SELECT *, ntile(10) OVER (PARTITION BY arm ORDER BY expected) AS tenth FROM said)
SELECT arm, tenth, count(*) AS drafts, avg(expected) AS expected, avg(came) AS came
FROM tenths GROUP BY arm, tenth ORDER BY arm, tenth;
