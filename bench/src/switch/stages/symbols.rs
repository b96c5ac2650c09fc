//! The symbols of a guest's kernel, as it tells them itself (`/proc/kallsyms`).
//!
//! Debian's `linux.uml` is stripped, so `perf` on the host finds none. A kernel of User-mode Linux runs at
//! the addresses that its symbols have, and modules at those where the guest's kernel put them.

use crate::row::Result;

/// Functions by their addresses.
#[derive(Debug, Default)]
pub(super) struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Reads lines of `ADDRESS TYPE NAME`, those of modules with the module's name in brackets behind.
    ///
    /// # Errors
    /// If there are none: the guest's kernel tells no addresses.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut all: Vec<(u64, String)> = text.lines().filter_map(symbol).collect();
        all.sort();
        match all.is_empty() {
            true => Err("the guest's kernel tells no addresses of its symbols".into()),
            false => Ok(Self(all)),
        }
    }

    /// The function that an address is in; one of a module is `MODULE:NAME`.
    pub(super) fn at(&self, address: u64) -> Option<&str> {
        let after = self.0.partition_point(|(begin, _)| *begin <= address);
        let (begin, name) = self.0.get(after.checked_sub(1)?)?;
        (address - begin < LONGEST).then_some(name)
    }
}

fn symbol(line: &str) -> Option<(u64, String)> {
    let mut words = line.split_whitespace();
    let address = u64::from_str_radix(words.next()?, 16).ok()?;
    let is_code = words.next()?.eq_ignore_ascii_case("t");
    let name = words.next()?;
    let name = match words.next() {
        Some(module) => format!("{}:{name}", module.trim_matches(['[', ']'])),
        None => name.to_owned(),
    };
    (is_code && address > 0).then_some((address, name))
}

/// No function is as long: what is further behind the last one is something else.
const LONGEST: u64 = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_in_the_function_that_begins_before_it() {
        let text = "0000000060031000 T tcp_ack\n0000000060031400 t tcp_mtu_probe\n\
                    0000000060400000 D jiffies\n0000000070001000 t start_xmit\t[virtio_net]\n";
        let symbols = Symbols::parse(text).unwrap();
        assert_eq!(symbols.at(0x6003_13ff), Some("tcp_ack"));
        assert_eq!(symbols.at(0x6003_1400), Some("tcp_mtu_probe"));
        assert_eq!(symbols.at(0x7000_1010), Some("virtio_net:start_xmit"));
        assert_eq!(
            (symbols.at(0x6003_0fff), symbols.at(0x6040_0010)),
            (None, None)
        );
    }

    #[test]
    fn without_addresses_there_are_no_symbols() {
        assert!(Symbols::parse("0000000000000000 T tcp_ack\n").is_err());
    }
}
