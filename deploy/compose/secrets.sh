#!/bin/sh
# Makes the secrets that compose.yaml mounts, in ./secrets; those that are there stay.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
# containers run under other users than yours: the folder is closed, its files are not
for name in postgres-password s3-access-key s3-secret-key grafana-password hvd_worker_id_key \
  hvd_kafka_policy_key; do
  [ -s "secrets/$name" ] || openssl rand -hex 24 | tr -d '\n' > "secrets/$name"
done
cat > secrets/s3-identities.json <<JSON
{"identities": [{"name": "mlflow", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
  "credentials": [{"accessKey": "$(cat secrets/s3-access-key)", "secretKey": "$(cat secrets/s3-secret-key)"}]}]}
JSON
chmod 644 secrets/*
