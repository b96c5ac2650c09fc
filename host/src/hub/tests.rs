//! What opening leaves behind, and who shares with whom.

mod hanging;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug_ring::Region;
use vnplug_ring::control::Open;

use super::open::Opening;
use super::*;
use crate::hub::places::Places;
use crate::spec::{Means, SourceSpec};
use vnplug_filter::Trust;
use vnplug_frame::Frame;
use vnplug_path::engine::WorkerOptions;
use vnplug_path::port::doorbell::Doorbell;
use vnplug_path::source::{Queue, QueueCounters, Received, Seen, SourceError, Wake};
use vnplug_testing::{Deadline, PATIENCE, eventually, until};

fn hub() -> Hub {
    let mut hub = Hub::new(Limits {
        ports: 100,
        ports_each: 100,
        user_bytes: 1 << 30,
        ring_bytes: 1 << 16,
        max_ring_bytes: 1 << 20,
    });
    let spec: SourceSpec = "lab=gen,pps=10,queues=2".parse().unwrap();
    hub.add_source(spec.open(&Means::default()).unwrap().start(0).unwrap());
    hub
}

pub(crate) fn request(device: &str, cluster: &str) -> Open {
    Open {
        ring_bytes: 4096,
        cluster: cluster.into(),
        ..Open::new(device)
    }
}

/// Opens a port of a process, with memory as it needs it.
fn open_own(
    hub: &mut Hub,
    request: &Open,
    owner: Peer,
    programs: Programs,
) -> Result<Opening, Refusal> {
    let need = hub.need(request, &owner, &programs)?;
    let memory = Memory::Own(OwnMemory {
        rings: vnplug_os::memory::rings(need.rings, &|| true).unwrap(),
        arenas: None,
    });
    hub.open(request, owner, programs, memory, None)
}

/// Goes on with a step until it is done.
fn done(hub: &mut Hub, step: Step) -> Result<Message, Refusal> {
    let deadline = Deadline::new("the step is done");
    let mut step = step;
    loop {
        match step.carry_on(hub, Instant::now() + Duration::from_millis(10)) {
            Step::Done(told) => return told,
            asks => step = asks,
        }
        deadline.check();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_port_that_cannot_be_made_leaves_no_member_and_no_place_behind() {
    let mut hub = hub();
    // The region is smaller than its places say: the second ring does not fit.
    let region = Region::heap(4 * 4096);
    let mut places = Places::new(16 * 4096);
    let free = places.free();
    let memory = Memory::Pool {
        region: &region,
        places: &mut places,
        grown: Grown::default(),
    };
    let owner = Peer::Vm("vm".into());
    let doorbell = Some(Doorbell::Silent);
    let refused = hub.open(
        &request("lab", "ids"),
        owner,
        Programs::default(),
        memory,
        doorbell,
    );
    assert_eq!(refused.err().unwrap().code, code::INTERNAL);
    assert_eq!(places.free(), free);
    assert!(hub.clusters.is_empty() && hub.ports.is_empty());
}

#[test]
fn a_group_without_room_for_its_arenas_leaves_no_place_behind() {
    let mut hub = hub();
    let region = Region::heap(64 * 4096);
    let mut open = |pages: u64| {
        let mut places = Places::new(pages * 4096);
        let free = places.free();
        let memory = Memory::Pool {
            region: &region,
            places: &mut places,
            grown: Grown::default(),
        };
        let request = Open {
            group: "all".into(),
            ring_bytes: 4096,
            arena_bytes: 1 << 16,
            transmit_bytes: 4096,
            ..request("lab", "")
        };
        let owner = Peer::Vm("vm".into());
        let doorbell = Some(Doorbell::Silent);
        let opened = hub.open(&request, owner, Programs::default(), memory, doorbell);
        let was = (hub.groups.len(), hub.ports.len());
        (
            opened.map_err(|refusal| refusal.code).err(),
            places.free() == free,
            was,
        )
    };
    // Its rings have room, the arenas of two queues have none.
    assert_eq!(open(20), (Some(code::NO_MEMORY), true, (0, 0)));
    // The control: with more room it is there, and has its places.
    assert_eq!(open(64), (None, false, (1, 1)));
}

#[test]
fn members_that_read_different_queues_are_different_clusters() {
    let mut hub = hub();
    for device in ["lab", "lab@1", "lab"] {
        let owner = Peer::User(0);
        let request = request(device, "ids");
        open_own(&mut hub, &request, owner, Programs::default()).unwrap();
    }
    let mut sizes: Vec<usize> = hub.clusters.values().map(|it| it.members.len()).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [1, 2]);
}

#[test]
fn filters_of_one_owner_are_bounded_in_sum() {
    let mut hub = hub();
    let accept = [6, 0, 0, 0, 1, 0, 0, 0];
    let long = [[0; 8]; 4095].concat();
    let bytes = [&long[..], &accept].concat();
    let program = Program::from_bytes(&bytes, Trust::Guest).unwrap();
    let programs = Programs {
        filter: Some(Arc::new(program)),
        ..Programs::default()
    };
    let owner = Peer::User(1000);
    // On two queues each costs twice its length: two ports of this filter fill the limit.
    for _ in 0..2 {
        hub.bears("lab", None, &owner, &programs).unwrap();
        let request = request("lab", "");
        open_own(&mut hub, &request, owner.clone(), programs.clone()).unwrap();
    }
    let refusal = hub.bears("lab", None, &owner, &programs).unwrap_err();
    assert_eq!(refusal.code, code::LIMIT);
    let advice = "the limit is 16384: use shorter filters or fewer ports";
    assert!(refusal.text.contains(advice), "{}", refusal.text);
    assert!(hub.bears("lab", Some(1), &owner, &programs).is_ok());
    assert!(hub.bears("lab", None, &Peer::User(1001), &programs).is_ok());
}

/// A filter of one value: `load` (a code) at this offset gives it.
fn of_value(load: u8, at: u32, value: u32) -> Arc<Program> {
    const JUMP_IF_EQUAL: u8 = 0x15;
    const RETURN: u8 = 0x06;
    let instruction = |code, jump_false, k: u32| {
        let [a, b, c, d] = k.to_le_bytes();
        [code, 0, 0, jump_false, a, b, c, d]
    };
    let bytes = [
        instruction(load, 0, at),
        instruction(JUMP_IF_EQUAL, 1, value),
        instruction(RETURN, 0, 1),
        instruction(RETURN, 0, 0),
    ];
    Arc::new(Program::from_bytes(bytes.as_flattened(), Trust::Guest).unwrap())
}

/// Has an owner's ports have these filters, each this many times, and asks for one more: what it is
/// told, and the same with one of the filters gone.
fn one_filter_more(
    filters: &[Arc<Program>],
    times: usize,
    more: Arc<Program>,
) -> [Result<(), Refusal>; 2] {
    let mut hub = hub();
    let owner = Peer::User(1000);
    let open = request("lab", "");
    open_own(&mut hub, &open, owner.clone(), Programs::default()).unwrap();
    let programs = Programs {
        filter: Some(more),
        ..Programs::default()
    };
    let load = |hub: &mut Hub, change: &dyn Fn(&mut load::Load)| {
        let owned = hub.owned.get_mut(&owner).unwrap();
        change(owned.loads.entry(0).or_default());
    };
    load(&mut hub, &|load| {
        filters.iter().for_each(|it| load.add(it, times));
    });
    let full = hub.bears("lab", None, &owner, &programs);
    load(&mut hub, &|load| load.remove(&filters[0], times));
    [full, hub.bears("lab", None, &owner, &programs)]
}

#[test]
fn values_that_one_owners_filters_name_are_bounded() {
    const WORD: u8 = 0x20;
    // Of one value each, so that a frame costs next to nothing.
    let filters: Vec<_> = (0..1024).map(|host| of_value(WORD, 26, host)).collect();
    let times = load::MAX_KEYS_EACH / filters.len();
    let [full, room] = one_filter_more(&filters, times, of_value(WORD, 26, 5000));
    let refusal = full.unwrap_err();
    assert_eq!(refusal.code, code::LIMIT);
    let text = refusal.text;
    assert!(text.contains("name 262146 values"), "{text}");
    assert!(text.contains("the limits are 262144 and 256"), "{text}");
    let advice = "use filters that are more alike, or fewer";
    assert!(text.contains(advice), "{text}");
    room.unwrap();
}

#[test]
fn places_that_one_owners_filters_look_at_are_bounded() {
    const BYTE: u8 = 0x30;
    let most = load::MAX_FIELDS_EACH as u32;
    let filters: Vec<_> = (0..most).map(|at| of_value(BYTE, 14 + at, 7)).collect();
    let [full, room] = one_filter_more(&filters, 2, of_value(BYTE, 14 + most, 7));
    let refusal = full.unwrap_err();
    assert_eq!(refusal.code, code::LIMIT);
    let text = refusal.text;
    assert!(text.contains("257 places of a frame"), "{text}");
    let advice = "use filters that are more alike, or fewer";
    assert!(text.contains(advice), "{text}");
    room.unwrap();
}

#[test]
fn rules_that_are_gone_hold_no_memory() {
    use vnplug_path::rules::{Key, Prepared};
    use vnplug_ring::control::{
        ExactRule, Flow, Pattern, Rule, RuleAction, RuleKey, RuleKind, WildcardRule,
    };
    let mut hub = hub();
    let owner = Peer::User(1000);
    let open = request("lab", "");
    let opening = open_own(&mut hub, &open, owner.clone(), Programs::default());
    let port = opening.ok().unwrap().opened.port;
    let flow = |n: u32| Flow {
        vlan_id: 0,
        proto: 6,
        host_a: n.to_be_bytes().into(),
        host_b: [10, 0, 0, 1].into(),
        port_a: 1,
        port_b: 2,
    };
    let exact = |n: u32| {
        Rule::Exact(ExactRule {
            flow: flow(n),
            action: RuleAction::Drop,
        })
    };
    let wildcard = |id: u16| {
        Rule::Wildcard(WildcardRule {
            id,
            matches: Pattern::default(),
            action: RuleAction::Count,
        })
    };
    let add = |hub: &mut Hub, rules: Vec<Rule>| {
        let prepared = Prepared::new(&rules).unwrap();
        let step = hub.add_rules(port, &prepared, Some(&owner)).unwrap();
        done(hub, step).unwrap();
    };
    let room = |hub: &Hub| hub.ports()[&port].rules.room;
    add(&mut hub, (0..5000).map(exact).collect());
    add(&mut hub, (0..2000).map(wildcard).collect());
    assert!(room(&hub).0 >= 5000 && room(&hub).1 >= 2000);
    for n in 1..5000 {
        let key = Key::new(&RuleKey::Exact(flow(n))).unwrap();
        let step = hub.remove_rule(port, key);
        done(&mut hub, step).unwrap();
    }
    assert!(room(&hub).0 <= 64, "{:?}", room(&hub));
    let step = hub.purge_rules(port, RuleKind::Wildcard, Duration::ZERO);
    let Message::Purged(purged) = done(&mut hub, step).unwrap() else {
        panic!("not purged");
    };
    assert_eq!(purged.len(), 2000);
    assert!(room(&hub).1 <= 64, "{:?}", room(&hub));
    // One rule named very often takes the room of one.
    add(&mut hub, vec![exact(7); 5000]);
    assert!(room(&hub).0 <= 64, "{:?}", room(&hub));
    // What is left is where it was, and there is room again.
    add(&mut hub, (100..4000).map(exact).collect());
    for n in [0, 7, 100, 3999] {
        let key = Key::new(&RuleKey::Exact(flow(n))).unwrap();
        let step = hub.rule_hits(port, key);
        assert!(done(&mut hub, step).is_ok(), "{n}");
    }
    assert_eq!(hub.ports()[&port].rules.exact, 3902);
}

/// A filter takes time to be compiled, and a large ring to be made.
#[test]
fn who_asked_before_a_group_of_the_host_was_made_does_not_show_its_vms_other_packets() {
    let mut hub = hub();
    let owner = Peer::User(0);
    let open = Open {
        group: "g".into(),
        ..request("lab", "")
    };
    // An operator who sees everything; nobody made a group of the host yet.
    let before = Programs::default();
    hub.need(&open, &owner, &before).unwrap();
    let group = NewHostGroup {
        name: "g".into(),
        source: "lab".into(),
        capacity: 1 << 16,
        sight: "udp".into(),
        home: a_file(),
        operators: vec![0],
    };
    hub.add_host_group(group).unwrap();
    hub.admit("g", "vm", "udp");
    let refused = open_own(&mut hub, &open, owner.clone(), before);
    assert_eq!(refused.err().unwrap().code, code::UNAVAILABLE);
    let now = Programs {
        sight: "udp".into(),
        ..Programs::default()
    };
    open_own(&mut hub, &open, owner, now).ok().unwrap();
}

fn a_file() -> Home {
    Home::File {
        path: "/nowhere".into(),
        memory: (Region::heap(2 << 20), Arc::default()),
        reader: std::fs::File::open("/dev/null").unwrap().into(),
    }
}

/// A hub with group "g" of the host, of which the user 0 may be a member.
fn hub_with_a_group() -> Hub {
    let mut hub = hub();
    let group = NewHostGroup {
        name: "g".into(),
        source: "lab".into(),
        capacity: 1 << 16,
        sight: String::new(),
        home: a_file(),
        operators: vec![0],
    };
    hub.add_host_group(group).unwrap();
    hub.admit("g", "vm", "");
    hub
}

fn close(hub: &mut Hub, port: u32) -> Closed {
    let mut closing = hub.begin_close(port).unwrap();
    let limit = Instant::now() + PATIENCE;
    assert!(closing.is_over(limit), "its threads do not let it go");
    hub.finish_close(closing)
}

fn member(hub: &mut Hub) -> Result<u32, Refusal> {
    let open = Open {
        group: "g".into(),
        ..request("lab", "")
    };
    let programs = Programs::default();
    let opening = open_own(hub, &open, Peer::User(0), programs)?;
    Ok(opening.opened.port)
}

#[test]
fn a_group_of_the_host_under_a_thread_that_hangs_is_laid_anew_by_nobody() {
    let mut hub = hub_with_a_group();
    let port = member(&mut hub).unwrap();
    assert!(close(&mut hub, port).remains.bytes() > 0);
    // Its threads answered: the next member's arenas lie there.
    let port = member(&mut hub).unwrap();
    let mut closing = hub.begin_close(port).unwrap();
    let line = hub.sources[0].workers[0].line();
    let mut silent = None;
    closing.queues[0] = Owed::ask(line, |reply| {
        silent = Some(reply);
        Command::Kick(Vec::new())
    });
    assert!(!closing.is_over(Instant::now()));
    drop(silent);
    assert!(closing.is_over(Instant::now() + Duration::from_secs(60)));
    assert!(hub.finish_close(closing).places.is_empty());
    let refused = member(&mut hub).unwrap_err();
    assert_eq!(refused.code, code::UNAVAILABLE);
    assert!(refused.text.contains("does not answer"), "{}", refused.text);
}

#[test]
fn queues_that_share_a_thread_keep_their_numbers_and_are_all_served() {
    let spec: SourceSpec = "lab=gen,pps=3000,queues=3,threads=2".parse().unwrap();
    let source = spec.open(&Means::default()).unwrap().start(0).unwrap();
    let names: Vec<&str> = source.workers.iter().map(|it| it.pulse().name()).collect();
    assert_eq!(names, ["lab@0", "lab@1", "lab@2"]);
    for (worker, first) in source.workers.iter().zip(0..) {
        let read = || {
            let (reply, answer) = std::sync::mpsc::channel();
            worker.send(Command::Snapshot(vnplug_path::engine::Asked::All, reply));
            answer.recv().unwrap().fanout.read
        };
        eventually(&format!("queue {first} is served"), || read() >= 10);
    }
}

#[test]
fn a_source_needs_a_thread() {
    let spec: SourceSpec = "lab=gen,pps=3000,threads=0".parse().unwrap();
    let refused = spec.open(&Means::default()).err().unwrap().to_string();
    assert!(
        refused.contains("threads is a number of threads above 0"),
        "{refused}"
    );
}

#[test]
fn what_is_lent_is_withdrawn_from_who_is_closing_too_and_forgotten_with_who_is_gone() {
    let mut hub = hub();
    let open = |hub: &mut Hub| {
        let open = Open {
            posts: true,
            transmit_bytes: 1 << 16,
            ..request("lab", "")
        };
        let opening = open_own(hub, &open, Peer::User(0), Programs::default());
        opening.unwrap().opened.port
    };
    let lender = open(&mut hub);
    for _ in 0..3 {
        let borrower = open(&mut hub);
        drop(hub.lend_port(lender, borrower, 2).unwrap());
        assert_eq!(hub.ports[&lender].lent_to.len(), 1);
        close(&mut hub, borrower);
        assert!(hub.ports[&lender].lent_to.is_empty());
    }
    let borrower = open(&mut hub);
    drop(hub.lend_port(lender, borrower, 2).unwrap());
    // Its thread may still send what waits, from the lender's memory.
    let goes = hub.begin_close(borrower).unwrap();
    let mut closing = hub.begin_close(lender).unwrap();
    assert_eq!(closing.withdrawn.len(), 1);
    assert!(closing.is_over(Instant::now() + PATIENCE));
    hub.finish_close(closing);
    hub.finish_close(goes);
    // So many at most.
    let lender = open(&mut hub);
    let mut lend = || {
        let borrower = open(&mut hub);
        hub.lend_port(lender, borrower, 2).map(drop)
    };
    let lent = (0..100).take_while(|_| lend().is_ok()).count();
    assert_eq!(lent, 64);
}
