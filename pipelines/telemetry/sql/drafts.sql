-- The files of an export, each row once. Exports of before have no share: none of their requests was
-- shed, and it is 1.
CREATE OR REPLACE VIEW told AS
FROM read_parquet([$files], union_by_name = true)
UNION ALL BY NAME SELECT 1.0::DOUBLE AS share WHERE false;

CREATE OR REPLACE VIEW drafts AS
SELECT * REPLACE (coalesce(share, 1.0) AS share) FROM told;
