//! `in_net(address, network)`: networks in SQL.

use std::net::IpAddr;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, BooleanArray, StringArray};
use datafusion::arrow::datatypes::DataType;
use datafusion::common::cast::as_string_array;
use datafusion::common::{Result, ScalarValue, exec_err};
use datafusion::logical_expr::{ColumnarValue, ScalarUDF, Volatility, create_udf};

/// The function: whether an address (text) is in a network (`10.0.0.0/8`, `2001:db8::/32`, or one
/// address). Null if the address is; an error if the network is none.
pub(crate) fn in_net() -> ScalarUDF {
    create_udf(
        "in_net",
        vec![DataType::Utf8, DataType::Utf8],
        DataType::Boolean,
        Volatility::Immutable,
        Arc::new(call),
    )
}

fn call(arguments: &[ColumnarValue]) -> Result<ColumnarValue> {
    let [addresses, networks] = arguments else {
        return exec_err!("in_net takes an address and a network");
    };
    let verdicts: BooleanArray = match (addresses, networks) {
        (ColumnarValue::Array(addresses), ColumnarValue::Scalar(network)) => {
            let network = text_of(network)?.map(Network::parse).transpose()?;
            let addresses = as_string_array(addresses)?;
            let verdict = |text: Option<&str>| Some(network.as_ref()?.has(text?));
            addresses.iter().map(verdict).collect()
        }
        _ => {
            let arrays = ColumnarValue::values_to_arrays(arguments)?;
            return each(&arrays).map(|verdicts| match arguments {
                [ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)] if verdicts.len() == 1 => {
                    let verdict = verdicts.is_valid(0).then(|| verdicts.value(0));
                    ColumnarValue::Scalar(ScalarValue::Boolean(verdict))
                }
                _ => ColumnarValue::Array(Arc::new(verdicts)),
            });
        }
    };
    Ok(ColumnarValue::Array(Arc::new(verdicts)))
}

/// A network for each address.
fn each(arrays: &[ArrayRef]) -> Result<BooleanArray> {
    let [addresses, networks] = arrays else {
        return exec_err!("in_net takes an address and a network");
    };
    let (addresses, networks): (&StringArray, &StringArray) =
        (as_string_array(addresses)?, as_string_array(networks)?);
    let verdict = |(address, network): (Option<&str>, Option<&str>)| {
        let (Some(address), Some(network)) = (address, network) else {
            return Ok(None);
        };
        Ok(Some(Network::parse(network)?.has(address)))
    };
    addresses.iter().zip(networks.iter()).map(verdict).collect()
}

fn text_of(value: &ScalarValue) -> Result<Option<&str>> {
    match value {
        ScalarValue::Utf8(text) => Ok(text.as_deref()),
        other => exec_err!("a network is a text, not {other}"),
    }
}

/// Addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Network {
    is_v4: bool,
    /// The first 32 bits of IPv4 are the lowest of these.
    bits: u128,
    /// How many of the lowest bits do not count.
    free: u32,
}

impl Network {
    fn parse(text: &str) -> Result<Self> {
        let (address, len) = match text.split_once('/') {
            Some((address, len)) => (address, Some(len)),
            None => (text, None),
        };
        let Ok(address) = address.parse::<IpAddr>() else {
            return no_network(text);
        };
        let width = if address.is_ipv4() { 32 } else { 128 };
        let free = match len.map(str::parse::<u32>) {
            None => 0,
            Some(Ok(len)) if len <= width => width - len,
            Some(_) => return no_network(text),
        };
        Ok(Self {
            is_v4: address.is_ipv4(),
            bits: bits(address),
            free,
        })
    }

    fn has(&self, text: &str) -> bool {
        let Ok(address) = text.parse::<IpAddr>() else {
            return false;
        };
        let differs = self.bits ^ bits(address);
        self.is_v4 == address.is_ipv4() && differs.checked_shr(self.free).unwrap_or(0) == 0
    }
}

fn no_network<T>(text: &str) -> Result<T> {
    exec_err!("'{text}' is no network: write 10.0.0.0/8 or 2001:db8::/32")
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_networks() {
        for (network, address, expected) in [
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.9.9.9/8", "10.1.2.3", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("10.1.2.3", "10.1.2.3", true),
            ("10.1.2.3/32", "10.1.2.2", false),
            ("0.0.0.0/0", "255.1.2.3", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "2001:db8::1", true),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::ffff:0:0/96", "10.1.2.3", false),
            ("10.0.0.0/8", "nonsense", false),
        ] {
            let has = Network::parse(network).unwrap().has(address);
            assert_eq!(has, expected, "{address} in {network}");
        }
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in [
            "",
            "/8",
            "10.0.0.0/33",
            "10/8",
            "::/129",
            "10.0.0.0/-1",
            "10.0.0.0/4294967295",
        ] {
            let error = Network::parse(text).unwrap_err().to_string();
            assert!(error.contains("is no network"), "{text}: {error}");
        }
    }
}
