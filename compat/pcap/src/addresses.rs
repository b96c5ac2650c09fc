//! A device's network addresses, as libpcap lists them.
#![expect(unsafe_code, reason = "a list in C's memory")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use crate::abi::Address;

/// An address and the length of its network's prefix, from `192.0.2.1/24`.
pub(crate) fn parse(text: &str) -> Option<(IpAddr, u32)> {
    let (address, bits) = text.split_once('/')?;
    let (address, bits): (IpAddr, u32) = (address.parse().ok()?, bits.parse().ok()?);
    let most = if address.is_ipv4() { 32 } else { 128 };
    (bits <= most).then_some((address, bits))
}

/// The network's number and its mask, both in network byte order as `pcap_lookupnet` gives them.
pub(crate) fn network(address: Ipv4Addr, bits: u32) -> (u32, u32) {
    let mask = mask4(bits);
    ((address.to_bits() & mask).to_be(), mask.to_be())
}

/// The list for a device, made with malloc; null if there are none (or no memory for more).
pub(crate) fn list(texts: &[String]) -> *mut Address {
    let mut first = ptr::null_mut();
    for (address, bits) in texts.iter().rev().filter_map(|text| parse(text)) {
        // SAFETY: zeros are a valid node.
        let Some(node) = (unsafe { allocate::<Address>() }) else {
            break;
        };
        // SAFETY: a fresh node.
        let node = unsafe { &mut *node };
        match address {
            IpAddr::V4(address) => {
                let mask = mask4(bits);
                node.addr = socket4(address);
                node.netmask = socket4(Ipv4Addr::from_bits(mask));
                if bits < 31 {
                    node.broadaddr = socket4(Ipv4Addr::from_bits(address.to_bits() | !mask));
                }
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                node.addr = socket6(address);
                node.netmask = socket6(Ipv6Addr::from_bits(mask));
            }
        }
        node.next = first;
        first = node;
    }
    first
}

/// Frees what `list` made.
///
/// # Safety
/// `list` is null or came from [`list`], and is freed once.
pub(crate) unsafe fn free(mut list: *mut Address) {
    while !list.is_null() {
        // SAFETY: the caller's promise.
        unsafe {
            let node = list.read();
            for part in [node.addr, node.netmask, node.broadaddr, node.dstaddr] {
                libc::free(part.cast());
            }
            libc::free(list.cast());
            list = node.next;
        }
    }
}

/// Memory of zeros for a `T`, by malloc.
///
/// # Safety
/// Zeros are a valid `T`.
pub(crate) unsafe fn allocate<T>() -> Option<*mut T> {
    // SAFETY: a plain allocation.
    let memory = unsafe { libc::calloc(1, size_of::<T>()) };
    (!memory.is_null()).then_some(memory.cast())
}

fn mask4(bits: u32) -> u32 {
    u32::MAX.checked_shl(32 - bits).unwrap_or(0)
}

fn socket4(address: Ipv4Addr) -> *mut libc::sockaddr {
    // SAFETY: zeros are a valid address.
    let Some(socket) = (unsafe { allocate::<libc::sockaddr_in>() }) else {
        return ptr::null_mut();
    };
    // SAFETY: fresh memory.
    unsafe {
        (*socket).sin_family = libc::AF_INET as libc::sa_family_t;
        (*socket).sin_addr.s_addr = address.to_bits().to_be();
    }
    socket.cast()
}

fn socket6(address: Ipv6Addr) -> *mut libc::sockaddr {
    // SAFETY: zeros are a valid address.
    let Some(socket) = (unsafe { allocate::<libc::sockaddr_in6>() }) else {
        return ptr::null_mut();
    };
    // SAFETY: fresh memory.
    unsafe {
        (*socket).sin6_family = libc::AF_INET6 as libc::sa_family_t;
        (*socket).sin6_addr.s6_addr = address.octets();
    }
    socket.cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_prefix_that_fits() {
        assert_eq!(parse("10.0.0.1/8"), Some(("10.0.0.1".parse().unwrap(), 8)));
        assert_eq!(parse("fe80::1/64"), Some(("fe80::1".parse().unwrap(), 64)));
        for bad in ["10.0.0.1", "10.0.0.1/33", "::/129", "x/8", "10.0.0.1/"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_network_is_the_address_without_its_host_part() {
        let of = |bits| network(Ipv4Addr::new(10, 1, 2, 3), bits);
        let (net, mask) = of(16);
        assert_eq!(net.to_ne_bytes(), [10, 1, 0, 0]);
        assert_eq!(mask.to_ne_bytes(), [255, 255, 0, 0]);
        assert_eq!(of(0), (0, 0));
        assert_eq!(of(32).1, u32::MAX);
    }

    #[test]
    fn a_list_is_in_order_and_freed_whole() {
        let texts = ["192.0.2.1/24".to_owned(), "bad".into(), "fe80::1/64".into()];
        let first = list(&texts);
        // SAFETY: the list was just made, and is freed once.
        unsafe {
            assert_eq!(i32::from((*(*first).addr).sa_family), libc::AF_INET);
            assert!(!(*first).broadaddr.is_null());
            let second = (*first).next;
            assert_eq!(i32::from((*(*second).addr).sa_family), libc::AF_INET6);
            assert!((*second).next.is_null() && (*second).broadaddr.is_null());
            free(first);
        }
    }
}
