//! Filtering rules.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::c_int;
use std::net::IpAddr;
use std::time::Duration;

use vnplug_ring::control::{
    ExactRule, Flow, Network, Pattern, Rule, RuleAction, RuleKey, RuleKind, WildcardRule,
};

use super::CPort;
use super::error::E_INVALID;
use crate::{Error, Port};

/// `struct vnplug_flow`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CFlow {
    pub(super) vlan_id: u16,
    pub(super) proto: u8,
    pub(super) version: u8,
    pub(super) host_a: [u8; 16],
    pub(super) host_b: [u8; 16],
    pub(super) port_a: u16,
    pub(super) port_b: u16,
}

/// `struct vnplug_pattern`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CPattern {
    pub(super) vlan_id: u16,
    pub(super) ethertype: u16,
    pub(super) proto: u8,
    pub(super) bidirectional: u8,
    pub(super) source_mac: [u8; 6],
    pub(super) target_mac: [u8; 6],
    pub(super) version: u8,
    pub(super) tos: u8,
    pub(super) tos_mask: u8,
    pub(super) tcp_flags: u8,
    pub(super) tcp_flags_mask: u8,
    pub(super) unused: u8,
    pub(super) source: [u8; 16],
    pub(super) source_mask: [u8; 16],
    pub(super) target: [u8; 16],
    pub(super) target_mask: [u8; 16],
    pub(super) source_ports: [u16; 2],
    pub(super) target_ports: [u16; 2],
}

/// `struct vnplug_rule_stats`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CRuleStats {
    pub(super) matched: u64,
    pub(super) idle_ms: u64,
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `flows` is null or points to `count`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_add_flow_rules(
    port: *mut CPort,
    flows: *const CFlow,
    count: usize,
    verdict: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(handle), false) = (unsafe { port.as_ref() }, flows.is_null()) else {
        return E_INVALID;
    };
    // SAFETY: not null; the caller's promise.
    let flows = unsafe { std::slice::from_raw_parts(flows, count) };
    handle.status(|port| {
        let action = action(verdict)?;
        let rule = |flow: &CFlow| {
            Ok(Rule::Exact(ExactRule {
                flow: flow.read()?,
                action,
            }))
        };
        let rules = flows.iter().map(rule).collect::<Result<Vec<_>, Error>>()?;
        port.add_rules(&rules)
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `flow` is null or may be read.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_remove_flow_rule(
    port: *mut CPort,
    flow: *const CFlow,
) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), Some(flow)) = (unsafe { (port.as_ref(), flow.as_ref()) }) else {
        return E_INVALID;
    };
    handle.status(|port| port.remove_rule(RuleKey::Exact(flow.read()?)))
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_remove_flow_rule`]; `stats` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_flow_rule_stats(
    port: *mut CPort,
    flow: *const CFlow,
    stats: *mut CRuleStats,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(flow) = (unsafe { flow.as_ref() }) else {
        return E_INVALID;
    };
    // SAFETY: the caller's promises are passed on.
    unsafe { tell_stats(port, || Ok(RuleKey::Exact(flow.read()?)), stats) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `pattern` is null or may be read.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_add_wildcard_rule(
    port: *mut CPort,
    id: u16,
    pattern: *const CPattern,
    verdict: u32,
) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), Some(pattern)) = (unsafe { (port.as_ref(), pattern.as_ref()) }) else {
        return E_INVALID;
    };
    handle.status(|port| {
        port.add_rule(&Rule::Wildcard(WildcardRule {
            id,
            matches: pattern.read()?,
            action: action(verdict)?,
        }))
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_remove_wildcard_rule(port: *mut CPort, id: u16) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { port.as_ref() };
    handle.map_or(E_INVALID, |handle| {
        handle.status(|port| port.remove_rule(RuleKey::Wildcard(id)))
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_remove_wildcard_rule`]; `stats` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_wildcard_rule_stats(
    port: *mut CPort,
    id: u16,
    stats: *mut CRuleStats,
) -> c_int {
    // SAFETY: the caller's promises are passed on.
    unsafe { tell_stats(port, || Ok(RuleKey::Wildcard(id)), stats) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_set_rule_default(port: *mut CPort, accept: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { port.as_ref() };
    handle.map_or(E_INVALID, |handle| {
        handle.status(|port| port.set_rule_default(accept != 0))
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `removed` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_purge_rules(
    port: *mut CPort,
    kind: u32,
    idle_ms: u64,
    removed: *mut usize,
) -> c_int {
    let kind = match kind {
        0 => RuleKind::Exact,
        1 => RuleKind::Wildcard,
        _ => return E_INVALID,
    };
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    match handle.attempt(|port| port.purge_rules(kind, Duration::from_millis(idle_ms))) {
        Ok(count) => {
            if !removed.is_null() {
                // SAFETY: not null, and may be written by the caller's promise.
                unsafe { removed.write(count) };
            }
            0
        }
        Err(status) => status,
    }
}

/// # Safety
/// `port` is null or open and not in use by another thread; `stats` is null or may be written.
unsafe fn tell_stats(
    port: *mut CPort,
    key: impl FnOnce() -> Result<RuleKey, Error>,
    stats: *mut CRuleStats,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(handle), false) = (unsafe { port.as_ref() }, stats.is_null()) else {
        return E_INVALID;
    };
    match handle.attempt(|port: &mut Port| port.rule_stats(key()?)) {
        Ok(told) => {
            let told = CRuleStats {
                matched: told.matched,
                idle_ms: u64::try_from(told.idle.as_millis()).unwrap_or(u64::MAX),
            };
            // SAFETY: not null, and may be written by the caller's promise.
            unsafe { stats.write(told) };
            0
        }
        Err(status) => status,
    }
}

impl CFlow {
    fn read(&self) -> Result<Flow, Error> {
        Ok(Flow {
            vlan_id: self.vlan_id,
            proto: self.proto,
            host_a: address(self.version, self.host_a)?,
            host_b: address(self.version, self.host_b)?,
            port_a: self.port_a,
            port_b: self.port_b,
        })
    }
}

impl CPattern {
    fn read(&self) -> Result<Pattern, Error> {
        let network = |base, mask| -> Result<Option<Network>, Error> {
            Ok(match self.version {
                0 => None,
                version => Some(Network {
                    address: address(version, base)?,
                    mask: address(version, mask)?,
                }),
            })
        };
        Ok(Pattern {
            bidirectional: self.bidirectional != 0,
            source_mac: self.source_mac,
            target_mac: self.target_mac,
            vlan_id: self.vlan_id,
            ethertype: self.ethertype,
            proto: self.proto,
            source: network(self.source, self.source_mask)?,
            target: network(self.target, self.target_mask)?,
            source_ports: self.source_ports.into(),
            target_ports: self.target_ports.into(),
            tos: self.tos,
            tos_mask: self.tos_mask,
            tcp_flags: self.tcp_flags,
            tcp_flags_mask: self.tcp_flags_mask,
        })
    }
}

fn address(version: u8, bytes: [u8; 16]) -> Result<IpAddr, Error> {
    match (version, bytes) {
        (4, [a, b, c, d, ..]) => Ok([a, b, c, d].into()),
        (6, bytes) => Ok(bytes.into()),
        _ => Err(Error::Invalid("the IP version of a rule is 4 or 6")),
    }
}

fn action(number: u32) -> Result<RuleAction, Error> {
    Ok(match number {
        0 => RuleAction::Accept,
        1 => RuleAction::Drop,
        2 => RuleAction::Count,
        _ => return Err(Error::Invalid("the action of a rule")),
    })
}
