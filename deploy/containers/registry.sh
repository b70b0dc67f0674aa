#!/bin/sh
# MLflow takes its passwords from URI and environment alone: read them from files, and become it.
set -eu
password=$(cat "$POSTGRES_PASSWORD_FILE")
AWS_ACCESS_KEY_ID=$(cat "$S3_ACCESS_KEY_FILE")
AWS_SECRET_ACCESS_KEY=$(cat "$S3_SECRET_KEY_FILE")
MLFLOW_BACKEND_STORE_URI="postgresql+psycopg2://$POSTGRES_USER:$password@$POSTGRES_HOST/$POSTGRES_DB"
export AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY MLFLOW_BACKEND_STORE_URI
# --allowed-hosts: by default it answers to localhost alone, against DNS rebinding
exec python -m mlflow server --host 0.0.0.0 --port 5000 --workers 2 \
  --artifacts-destination "$S3_BUCKET_URI" --allowed-hosts "$MLFLOW_ALLOWED_HOSTS"
