//! `community_id(protocol, src, dst, src_port, dst_port)`: the name that other tools give a flow.

use std::sync::Arc;

use datafusion::arrow::array::{Array, StringArray, UInt8Array, UInt16Array};
use datafusion::arrow::datatypes::{DataType, UInt8Type, UInt16Type};
use datafusion::common::cast::{as_primitive_array, as_string_array};
use datafusion::common::{Result, exec_err};
use datafusion::logical_expr::{ColumnarValue, ScalarUDF, Volatility, create_udf};
use vnplug_store::extract::community_id as of_flow;

/// The function: null where a flow has no such name, or what it is made of is not known.
pub(crate) fn community_id() -> ScalarUDF {
    create_udf(
        "community_id",
        vec![
            DataType::UInt8,
            DataType::Utf8,
            DataType::Utf8,
            DataType::UInt16,
            DataType::UInt16,
        ],
        DataType::Utf8,
        Volatility::Immutable,
        Arc::new(call),
    )
}

fn call(arguments: &[ColumnarValue]) -> Result<ColumnarValue> {
    let arrays = ColumnarValue::values_to_arrays(arguments)?;
    let [protocol, src, dst, src_port, dst_port] = &arrays[..] else {
        return exec_err!("community_id takes protocol, src, dst, src_port, dst_port");
    };
    let protocol: &UInt8Array = as_primitive_array::<UInt8Type>(protocol)?;
    let (src, dst) = (as_string_array(src)?, as_string_array(dst)?);
    let src_port: &UInt16Array = as_primitive_array::<UInt16Type>(src_port)?;
    let dst_port: &UInt16Array = as_primitive_array::<UInt16Type>(dst_port)?;
    let ids: StringArray = (0..protocol.len())
        .map(|at| {
            let known = |array: &dyn Array| array.is_valid(at);
            if !(known(protocol) && known(src) && known(dst)) {
                return None;
            }
            let ends = (src.value(at).parse().ok()?, dst.value(at).parse().ok()?);
            let has_ports = known(src_port) && known(dst_port);
            let ports = has_ports.then(|| (src_port.value(at), dst_port.value(at)));
            of_flow(protocol.value(at), ends, ports)
        })
        .collect();
    Ok(ColumnarValue::Array(Arc::new(ids)))
}
