{{ config(materialized='view') }}
SELECT * EXCLUDE (_cdc_operation, _cdc_sequence, _cdc_epoch, _cdc_lsn, _cdc_seq, _cdc_ts)
FROM {{ ref('orders_changes') }} WHERE _cdc_operation <> 'DELETE'
