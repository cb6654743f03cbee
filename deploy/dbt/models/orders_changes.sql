{{ config(materialized='incremental', unique_key='id', incremental_strategy='delete+insert',
          on_schema_change='append_new_columns') }}
SELECT * FROM {{ source('feeds', 'orders') }}
{% if is_incremental() %} WHERE _cdc_sequence > (SELECT coalesce(max(_cdc_sequence), '') FROM {{ this }}) {% endif %}
QUALIFY row_number() OVER (PARTITION BY id ORDER BY _cdc_sequence DESC) = 1
