//! Filtering rules.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::Ordering;
use std::time::Duration;

use vnplug::{Error, Rule, RuleAction, RuleKey, RuleKind, RuleStats, code};

use super::attempt;
use crate::abi::ring::Ring;
use crate::abi::rule::{AUTO_RULE_ID, FilteringRule, HashRule, Stats};
use crate::error::{INVALID_ARGUMENT, NOT_ENOUGH_MEMORY, NOT_SUPPORTED};
use crate::handle::{Failure, Handle};
use crate::rules;

/// `pfring_add_filtering_rule`.
///
/// # Safety
/// See [`super::with`]; `rule_to_add` is NULL or a rule.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_add_filtering_rule(
    ring: *mut Ring,
    rule_to_add: *mut FilteringRule,
) -> c_int {
    let act = |handle: &Handle| {
        if rule_to_add.is_null() {
            return Err(INVALID);
        }
        // SAFETY: a rule, as the caller says; any bytes are one.
        let rule = unsafe { rule_to_add.read_unaligned() };
        let mut reader = handle.reader();
        let chosen = match rule.rule_id {
            AUTO_RULE_ID => reader.free_rule_id(),
            id => Some(id),
        };
        let id = chosen.ok_or(Failure::new(NOT_ENOUGH_MEMORY, libc::ENOSPC))?;
        let wildcard = rules::wildcard(&rule, id, handle.if_index)?;
        reader.add_rule(Rule::Wildcard(wildcard), rule.locked != 0)?;
        // SAFETY: the caller's rule; it learns which number was chosen.
        unsafe { (*rule_to_add).rule_id = id };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_remove_filtering_rule`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_remove_filtering_rule(
    ring: *mut Ring,
    rule_id: u16,
) -> c_int {
    let key = RuleKey::Wildcard(rule_id);
    let act = |handle: &Handle| handle.reader().remove_rule(key).map_err(no_such_rule);
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_get_filtering_rule_stats`: a `hash_filtering_rule_stats`, as of hash rules.
///
/// # Safety
/// See [`super::with`]; `stats_len` is NULL or writable, and `stats` has so much room.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_filtering_rule_stats(
    ring: *mut Ring,
    rule_id: u16,
    stats: *mut c_char,
    stats_len: *mut c_uint,
) -> c_int {
    let key = RuleKey::Wildcard(rule_id);
    let act = |handle: &Handle| {
        let found = handle.reader().rule_stats(key).map_err(no_such_rule)?;
        // SAFETY: the caller's promise.
        unsafe { put(found, stats, stats_len) }
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_purge_idle_rules`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_purge_idle_rules(
    ring: *mut Ring,
    inactivity_sec: u16,
) -> c_int {
    let idle = Duration::from_secs(inactivity_sec.into());
    let act = |handle: &Handle| Ok(handle.reader().purge_rules(RuleKind::Wildcard, idle)?);
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_handle_hash_filtering_rule`.
///
/// # Safety
/// See [`super::with`]; `rule_to_add` is NULL or a rule.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_handle_hash_filtering_rule(
    ring: *mut Ring,
    rule_to_add: *mut HashRule,
    add_rule: u8,
) -> c_int {
    let act = |handle: &Handle| {
        // SAFETY: the caller's promise.
        let rule = unsafe { read(rule_to_add) }?;
        if add_rule == 0 {
            let key = RuleKey::Exact(rules::flow(&rule)?.ordered());
            return handle.reader().remove_rule(key).map_err(no_such_rule);
        }
        let mut exact = rules::exact(&rule)?;
        exact.flow = exact.flow.ordered();
        Ok(handle.reader().add_rule(Rule::Exact(exact), false)?)
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_get_hash_filtering_rule_stats`.
///
/// # Safety
/// See [`super::with`]; `rule` is NULL or a rule, `stats_len` NULL or writable, and `stats` has so
/// much room.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_hash_filtering_rule_stats(
    ring: *mut Ring,
    rule: *mut HashRule,
    stats: *mut c_char,
    stats_len: *mut c_uint,
) -> c_int {
    let act = |handle: &Handle| {
        // SAFETY: the caller's promise.
        let rule = unsafe { read(rule) }?;
        let key = RuleKey::Exact(rules::flow(&rule)?.ordered());
        let found = handle.reader().rule_stats(key).map_err(no_such_rule)?;
        // SAFETY: the caller's promise.
        unsafe { put(found, stats, stats_len) }
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_purge_idle_hash_rules`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_purge_idle_hash_rules(
    ring: *mut Ring,
    inactivity_sec: u16,
) -> c_int {
    let idle = Duration::from_secs(inactivity_sec.into());
    let act = |handle: &Handle| Ok(handle.reader().purge_rules(RuleKind::Exact, idle)?);
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_toggle_filtering_policy`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_toggle_filtering_policy(
    ring: *mut Ring,
    rules_default_accept_policy: u8,
) -> c_int {
    let accept = rules_default_accept_policy != 0;
    let act = |handle: &Handle| {
        handle.reader().set_rule_default(accept)?;
        let shown = &handle.ring.default_accept_policy;
        shown.store(accept.into(), Ordering::Relaxed);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_filtering_mode`: rules are software everywhere.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_filtering_mode(ring: *mut Ring, mode: u32) -> c_int {
    let set = match mode {
        HARDWARE_AND_SOFTWARE | SOFTWARE_ONLY => Ok(()),
        HARDWARE_ONLY => Err(Failure::new(NOT_SUPPORTED, libc::ENOTSUP)),
        _ => Err(INVALID),
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |_| set) }
}

/// # Safety
/// `rule` is NULL or a rule.
unsafe fn read(rule: *const HashRule) -> Result<HashRule, Failure> {
    if rule.is_null() {
        return Err(INVALID);
    }
    // SAFETY: a rule, as the caller says; any bytes are one.
    Ok(unsafe { rule.read_unaligned() })
}

/// Writes a rule's statistics where a program wants them.
///
/// # Safety
/// `stats_len` is NULL or writable, and `stats` is NULL or has so much room.
unsafe fn put(
    (found, action): (RuleStats, RuleAction),
    stats: *mut c_char,
    stats_len: *mut c_uint,
) -> Result<(), Failure> {
    if stats.is_null() || stats_len.is_null() {
        return Err(INVALID);
    }
    let len = size_of::<Stats>() as c_uint;
    // SAFETY: readable, as the caller says.
    if unsafe { stats_len.read() } < len {
        return Err(INVALID);
    }
    let of = |wanted: RuleAction| if action == wanted { found.matched } else { 0 };
    let written = Stats {
        matched: found.matched,
        filtered: of(RuleAction::Drop),
        match_forward: of(RuleAction::Accept),
        inactivity: u32::try_from(found.idle.as_secs()).unwrap_or(u32::MAX),
    };
    // SAFETY: room for it, as was just looked at.
    unsafe {
        stats.cast::<Stats>().write_unaligned(written);
        stats_len.write(len);
    }
    Ok(())
}

/// What the daemon did not find is a rule here, not a device.
fn no_such_rule(error: Error) -> Failure {
    match error {
        Error::Refused { code, .. } if code == code::NOT_FOUND => {
            Failure::new(INVALID_ARGUMENT, libc::ENOENT)
        }
        other => other.into(),
    }
}

const INVALID: Failure = Failure::new(INVALID_ARGUMENT, libc::EINVAL);

/// `filtering_mode`.
const HARDWARE_AND_SOFTWARE: u32 = 0;
const HARDWARE_ONLY: u32 = 1;
const SOFTWARE_ONLY: u32 = 2;
