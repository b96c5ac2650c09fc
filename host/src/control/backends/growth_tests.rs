//! What is plugged for whom, and when it is taken out.

use std::time::Instant;

use super::growth::*;
use super::ports::{Growing, Part};
use crate::control::waiting::Whom;

const WHOM: Whom = Whom {
    token: 5,
    id: 6,
    app: 7,
};
const PLUGGER: u64 = 3;

#[test]
fn a_device_holds_what_is_shared_and_a_page() {
    assert_eq!(device_len(1), 8192);
    assert_eq!(device_len(4096), 8192);
    assert_eq!(device_len(1 << 20), 1 << 21);
    assert_eq!(device_len(u64::MAX), u64::MAX);
}

fn wanted() -> Wanted {
    let open = Growing::of("lab");
    Wanted::Port(WHOM, Box::new(open))
}

/// A port's device that is plugged.
fn device(growth: &mut Growth, memory: u64) -> u32 {
    let made = vnplug_os::memory::exported(8192, true, &|| true).unwrap();
    let (number, token) = growth.begin("vm", 8192, wanted()).unwrap();
    assert_eq!(token, PLUGGER);
    growth.is_for_port(number, WHOM, Part::Rings, (memory, made));
    assert!(growth.plugged(PLUGGER, number, true).is_some());
    number
}

fn growth() -> Growth {
    let mut growth = Growth::new();
    growth.offer("vm", PLUGGER, 3 * 8192);
    growth
}

#[test]
fn a_device_goes_when_its_port_is_closed_and_no_program_maps_it() {
    let mut growth = growth();
    let (first, second) = (device(&mut growth, 11), device(&mut growth, 12));
    growth.opened(WHOM, 11, None);
    growth.opened(WHOM, 12, None);
    assert!(growth.give_up(|_| true).is_empty());
    assert_eq!(growth.closed(11), None);
    assert_eq!(growth.released("other", 11), None);
    assert_eq!(growth.released("vm", 11), Some(first));
    assert_eq!(growth.released("vm", 12), None);
    assert_eq!(growth.closed(12), Some(second));
    // They count until they are gone.
    assert_eq!(growth.left("vm"), 8192);
    for number in [first, second] {
        assert_eq!(growth.end(number), Some(PLUGGER));
        assert!(growth.unplugged(PLUGGER + 1, number).is_none());
        assert!(growth.unplugged(PLUGGER, number).is_none());
    }
    assert_eq!(growth.left("vm"), 3 * 8192);
}

#[test]
fn what_a_new_agent_does_not_know_goes_later() {
    let mut growth = growth();
    let (known, unknown) = (device(&mut growth, 11), device(&mut growth, 12));
    growth.opened(WHOM, 11, None);
    growth.opened(WHOM, 12, None);
    growth.closed(11);
    growth.closed(12);
    growth.named("vm", &[11]);
    let now = Instant::now();
    assert!(growth.lingered(now).is_empty());
    assert!(growth.look_again(now).unwrap() <= LINGERS);
    assert_eq!(growth.lingered(now + LINGERS), [unknown]);
    assert_eq!(growth.released("vm", 11), Some(known));
}

/// To empty it may take long: the control thread has others to serve.
#[test]
fn memory_that_nobody_uses_is_for_others_to_empty() {
    let mut growth = growth();
    let (ended, lost) = (device(&mut growth, 11), device(&mut growth, 12));
    growth.opened(WHOM, 11, None);
    growth.opened(WHOM, 12, None);
    growth.closed(11);
    assert_eq!(growth.end(ended), Some(PLUGGER));
    assert_eq!(growth.take_unused().len(), 1);
    growth.unplugged(PLUGGER, lost);
    assert!(growth.take_unused().is_empty());
    growth.closed(12);
    assert_eq!(growth.take_unused().len(), 1);
    assert_eq!(growth.used("vm").0, 1);
}

#[test]
fn a_port_keeps_its_device_when_who_plugged_it_goes_and_the_next_takes_it_out() {
    let mut growth = growth();
    let number = device(&mut growth, 11);
    growth.opened(WHOM, 11, None);
    assert!(growth.gone(PLUGGER).is_empty());
    assert_eq!((growth.used("vm"), growth.left("vm")), ((1, 8192), 0));
    growth.offer("vm", 9, 8192);
    // It is not taken out: its port is open. One that nobody knows is, some time later.
    assert!(!growth.found(9, number));
    assert!(!growth.found(9, number ^ 1));
    assert_eq!(growth.lingered(Instant::now() + LINGERS), [number ^ 1]);
    growth.released("vm", 11);
    assert_eq!(growth.closed(11), Some(number));
    assert_eq!(growth.end(number), Some(9));
}

#[test]
fn what_nobody_can_take_out_is_forgotten_some_time_after_its_port() {
    let mut growth = growth();
    let number = device(&mut growth, 11);
    growth.opened(WHOM, 11, None);
    growth.gone(PLUGGER);
    assert_eq!(growth.closed(11), None);
    assert_eq!(growth.used("vm").0, 1);
    assert_eq!(growth.lingered(Instant::now() + LINGERS), [number]);
    assert_eq!(growth.end(number), None);
    assert_eq!(growth.used("vm").0, 0);
}

#[test]
fn who_says_that_what_is_waited_for_is_unplugged_tells_who_waited() {
    let mut growth = growth();
    let (number, _) = growth.begin("vm", 8192, wanted()).unwrap();
    assert!(growth.unplugged(PLUGGER, number).is_some());
    assert!(growth.plugged(PLUGGER, number, true).is_none());
    // One that a port still has stays counted, whatever is said.
    let number = device(&mut growth, 11);
    growth.opened(WHOM, 11, None);
    assert!(growth.unplugged(PLUGGER, number).is_none());
    assert_eq!(growth.used("vm").0, 1);
    assert_eq!(growth.closed(11), None);
    assert_eq!(growth.used("vm").0, 0);
}

#[test]
fn a_port_that_is_given_up_leaves_no_device_behind() {
    let mut growth = growth();
    let plugged = device(&mut growth, 11);
    let (coming, _) = growth.begin("vm", 8192, wanted()).unwrap();
    let made = vnplug_os::memory::exported(8192, true, &|| true).unwrap();
    growth.is_for_port(coming, WHOM, Part::Rings, (12, made));
    assert!(growth.give_up(|whom| whom.token != WHOM.token).is_empty());
    assert_eq!(growth.give_up(|whom| whom.token == WHOM.token), [plugged]);
    // What still comes is taken out when it is there.
    assert!(growth.is_late(PLUGGER, coming) && !growth.is_late(PLUGGER, plugged));
}
