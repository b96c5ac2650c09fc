//! Decisions, with rules and without.

use super::*;

fn frame(to: u8, from: u8) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from]);
    frame
}

fn switch(ports: &[Number]) -> Forwarder {
    let mut switch = Forwarder::new(Limits::default());
    ports.iter().for_each(|port| switch.add(*port));
    switch.begin(0);
    switch
}

fn due(switch: &mut Forwarder, from: Number, frame: &[u8]) -> Vec<Number> {
    let way = switch.decide(from, (frame, frame.len()), None);
    let due = way.forms().map(|(_, to)| switch.due(to).to_vec());
    due.concat()
}

#[test]
fn strangers_are_flooded_and_who_was_heard_is_found() {
    let mut it = switch(&[1, 2, 3]);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [2, 3]);
    assert_eq!(due(&mut it, 2, &frame(8, 9)), [1]);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [2]);
    // A station behind the port that the frame came from.
    assert_eq!(due(&mut it, 1, &frame(8, 7)), []);
    it.remove(2);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [3]);
    let counters = it.counters;
    assert_eq!(
        (counters.unicast, counters.flooded, counters.consumed),
        (2, 2, 1)
    );
    assert_eq!((counters.entered, counters.accounted()), (5, 5));
    assert_eq!(counters.due, 5);
}

#[test]
fn groups_and_what_bridges_keep_for_themselves_pass_and_a_hub_floods_all() {
    let mut it = switch(&[1, 2, 3]);
    for group in [
        [0xff; 6],
        [1, 0x80, 0xc2, 0, 0, 0],
        [0x33, 0x33, 0, 0, 0, 1],
    ] {
        let mut frame = frame(0, 8);
        frame[..6].copy_from_slice(&group);
        assert_eq!(due(&mut it, 3, &frame), [1, 2]);
    }
    assert_eq!(due(&mut it, 1, &frame(9, 7)), [2, 3]);
    it.is_hub = true;
    assert_eq!(due(&mut it, 1, &frame(8, 7)), [2, 3]);
}

#[test]
fn the_hosts_own_frames_go_where_they_belong_and_teach_nothing() {
    let mut it = switch(&[1, 2]);
    assert_eq!(due(&mut it, 2, &frame(9, 8)), [1]);
    assert_eq!(due(&mut it, HOST, &frame(8, 7)), [2]);
    assert_eq!(due(&mut it, HOST, &frame(5, 8)), [1, 2]);
    assert_eq!(due(&mut it, 1, &frame(8, 6)), [2]);
    assert_eq!(it.table.len(), 2);
}

#[test]
fn what_is_no_frame_is_dropped_and_teaches_nothing() {
    let mut it = switch(&[1, 2]);
    for len in 0..14 {
        assert_eq!(due(&mut it, 1, &frame(9, 8)[..len]), []);
    }
    let mut group = frame(9, 8);
    group[6] |= 1;
    assert_eq!(due(&mut it, 1, &group), []);
    assert!(
        it.decide(1, (&frame(9, 8), 1515), Some(Fault::Long)) == Way::default()
            && it.decide(1, (&[], 0), Some(Fault::Lie)) == Way::default()
    );
    let counters = it.counters;
    assert_eq!(
        [Reason::Short, Reason::Source, Reason::Long, Reason::Offload]
            .map(|reason| counters.refused.of(reason)),
        [14, 1, 1, 1]
    );
    assert_eq!(counters.accounted(), counters.entered);
    assert!(it.table.is_empty());
    assert_eq!(due(&mut it, 1, &frame(9, 8)[..14]), [2]);
}

#[test]
fn who_is_alone_speaks_to_nobody() {
    let mut it = switch(&[1]);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), []);
    assert_eq!((it.counters.consumed, it.counters.due), (1, 0));
}

/// One with settings of its ports: number and text.
fn ruled(ports: &[(Number, &str)]) -> Forwarder {
    let mut switch = switch(&[]);
    for (port, text) in ports {
        set(&mut switch, *port, text);
    }
    switch
}

fn set(switch: &mut Forwarder, port: Number, text: &str) {
    let mut settings = PortSettings::default();
    settings.apply(text).unwrap();
    switch.add(port);
    switch.set(port, &settings, 0);
}

fn refused(switch: &Forwarder, reason: Reason) -> u64 {
    assert_eq!(switch.counters.accounted(), switch.counters.entered);
    switch.counters.refused.of(reason)
}

#[test]
fn vlans_are_apart_and_each_port_has_its_form() {
    let mut it = ruled(&[
        (1, "vlan=10"),
        (2, "vlan=10"),
        (3, "vlan=20"),
        (4, "trunk=10+20"),
        (5, ""),
        (6, ""),
    ]);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [2, 4]);
    assert_eq!(due(&mut it, 3, &frame(9, 8)), [4]);
    assert_eq!(due(&mut it, 5, &frame(9, 8)), [6]);
    // The same station is another one in another VLAN.
    assert_eq!(due(&mut it, 2, &frame(8, 9)), [1]);
    assert_eq!(it.table.len(), 4);
    let way = it.decide(1, (&frame(0xfe, 8), 60), None);
    assert_eq!(it.due(way.kept()), [2]);
    let [_, (edit, tagged)] = way.forms();
    assert_eq!((edit, it.due(tagged)), (Edit::Push(10), &[4][..]));
    let mut tagged = frame(9, 7).to_vec();
    tagged.splice(12..12, [0x81, 0, 0, 10]);
    assert_eq!(due(&mut it, 1, &tagged), []);
    assert_eq!(refused(&it, Reason::Vlan), 1);
    let way = it.decide(4, (&tagged, tagged.len()), None);
    assert_eq!(it.due(way.kept()), []);
    let [(edit, plain), _] = way.forms();
    assert_eq!((edit, it.due(plain)), (Edit::Pop, &[2][..]));
    // A port that changes its VLAN is forgotten in the old one.
    set(&mut it, 2, "vlan=20");
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [4]);
    set(&mut it, 2, "");
    assert_eq!(due(&mut it, 5, &frame(9, 8)), [2, 6]);
    it.set(1, &PortSettings::default(), 0);
    assert!(it.has_rules);
    (3..5).for_each(|port| it.remove(port));
    assert!(!it.has_rules);
}

/// A frame with another tag, by the plain meaning of the words.
fn edited(edit: Edit, frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let tag = |tci: u16| [[0x81, 0], tci.to_be_bytes()].concat();
    match edit {
        Edit::Keep => {}
        Edit::Pop => drop(frame.drain(12..16)),
        Edit::Push(tci) => drop(frame.splice(12..12, tag(tci))),
        Edit::Set(tci) => drop(frame.splice(12..16, tag(tci))),
    }
    frame
}

#[test]
fn nobody_hops_into_another_vlan() {
    let texts = [
        "",
        "vlan=1",
        "vlan=2",
        "trunk=1-3",
        "trunk=2+3 native=1",
        "trunk=1 native=2",
        "trunk=3 native=0",
        "trunk=1-4094",
    ];
    let ports: Vec<_> = (1..).zip(texts).collect();
    let mut it = ruled(&ports);
    let rules: Vec<Rule> = texts
        .iter()
        .map(|text| {
            let mut settings = PortSettings::default();
            settings.apply(text).unwrap();
            Rule::new(&settings, 0, 0)
        })
        .collect();
    let mut random = 1_u64;
    let mut below = |end: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % end
    };
    let (mut given, mut hopped) = (0_u64, 0_u64);
    for round in 0..1_000_000_u64 {
        if round % 128 == 0 {
            it.begin(round);
        }
        let from = 1 + below(8) as Number;
        let mut sent = frame(below(6) as u8, below(6) as u8).to_vec();
        for _ in 0..below(4) {
            let kind = if below(5) == 0 { 0x88a8_u16 } else { 0x8100 };
            let tci = (below(8) << 13) as u16 | [0, 1, 2, 3, 4, 4095][below(6) as usize];
            let tag = [kind.to_be_bytes(), tci.to_be_bytes()].concat();
            sent.splice(12..12, tag);
        }
        sent.truncate(14 + below(60) as usize);
        let way = it.decide(from, (&sent, sent.len()), None);
        let Some(class) = rules[usize::from(from) - 1].classify(&sent) else {
            assert_eq!(way.count(), 0);
            continue;
        };
        for (edit, to) in way.forms() {
            for port in it.due(to) {
                // What the port's far end takes it for, if it is set up as the port is.
                let rule = &rules[usize::from(*port) - 1];
                let seen = rule.classify(&edited(edit, &sent)).map(|it| it.vlan);
                given += 1;
                hopped += u64::from(seen != Some(class.vlan) || *port == from);
            }
        }
    }
    assert_eq!(hopped, 0);
    assert!(given > 200_000, "{given}");
    assert!(refused(&it, Reason::Vlan) > 100_000);
    assert_eq!(it.counters.due, given);
}

#[test]
fn isolated_ports_reach_only_others() {
    let mut it = ruled(&[(1, "isolated=yes"), (2, "isolated=yes"), (3, "")]);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [3]);
    assert_eq!(due(&mut it, 2, &frame(0xff, 7)), [3]);
    assert_eq!(due(&mut it, 2, &frame(8, 7)), []);
    assert_eq!(refused(&it, Reason::Isolated), 1);
    assert_eq!(due(&mut it, 3, &frame(8, 6)), [1]);
    assert_eq!(due(&mut it, 3, &frame(0xff, 6)), [1, 2]);
}

#[test]
fn the_first_that_a_port_is_locked_to_is_nobody_elses_station_and_stays_the_first() {
    let mut it = ruled(&[(1, ""), (2, "lock=first"), (3, "")]);
    assert_eq!(due(&mut it, 1, &frame(9, 7)), [2, 3]);
    // A station that was heard elsewhere, though nothing is said of that port.
    assert_eq!(due(&mut it, 2, &frame(9, 7)), []);
    assert_eq!(refused(&it, Reason::Lock), 1);
    assert_eq!(due(&mut it, 2, &frame(9, 8)), [1, 3]);
    assert_eq!(due(&mut it, 3, &frame(7, 6)), [1]);
    // Another setting is no reason to begin again; this one is.
    let mut settings = PortSettings::default();
    settings.apply("lock=first flood=no").unwrap();
    it.set(2, &settings, 0);
    assert_eq!(due(&mut it, 2, &frame(7, 5)), []);
    assert_eq!(due(&mut it, 3, &frame(8, 6)), [2]);
    it.set(2, &PortSettings::default(), 0);
    it.set(2, &settings, 0);
    assert_eq!(due(&mut it, 2, &frame(7, 5)), [1]);
}

#[test]
fn the_hosts_programs_are_many_whatever_is_said_of_ports() {
    let mut it = ruled(&[(1, "lock=first"), (2, "")]);
    let mut settings = PortSettings::default();
    settings.apply("lock=first").unwrap();
    it.set(HOST, &settings, 0);
    assert_eq!(due(&mut it, HOST, &frame(9, 8)), [1, 2]);
    assert_eq!(due(&mut it, HOST, &frame(9, 7)), [1, 2]);
    // Nobody is to be found there, and others may be who it was.
    assert_eq!(due(&mut it, 1, &frame(7, 8)), [2]);
    assert_eq!(due(&mut it, 2, &frame(8, 6)), [1]);
    assert_eq!(due(&mut it, HOST, &frame(9, 8)), []);
    assert_eq!(it.counters.accounted(), it.counters.entered);
}

#[test]
fn a_locked_port_sends_as_nobody_else_and_nobody_else_as_its_station() {
    let mut it = ruled(&[(1, "lock=02:00:00:00:00:08"), (2, ""), (3, "lock=first")]);
    // Before the victim has said a word.
    assert_eq!(due(&mut it, 2, &frame(9, 8)), []);
    assert_eq!(due(&mut it, 2, &frame(8, 7)), [1]);
    assert_eq!(due(&mut it, 1, &frame(9, 6)), []);
    assert_eq!(refused(&it, Reason::Lock), 2);
    assert_eq!(it.refused(2).of(Reason::Lock), 1);
    assert_eq!(
        due(&mut it, 3, &frame(7, 8)),
        [],
        "and so it is not the first"
    );
    assert_eq!(due(&mut it, 3, &frame(7, 5)), [2]);
    assert_eq!(due(&mut it, 3, &frame(7, 4)), []);
    // 100,000 times; time passes.
    let mut lost = 0;
    for second in 0..100_u64 {
        it.begin(second * 10_000_000);
        for _ in 0..1000 {
            assert_eq!(due(&mut it, 2, &frame(9, 8)), []);
            assert_eq!(due(&mut it, 2, &frame(9, 5)), []);
        }
        lost += u32::from(due(&mut it, 2, &frame(8, 7)) != [1]);
        lost += u32::from(due(&mut it, 1, &frame(5, 8)) != [3]);
    }
    assert_eq!((lost, it.counters.moves), (0, 0));
    // It is free again.
    it.set(1, &PortSettings::default(), 0);
    assert_eq!(due(&mut it, 2, &frame(9, 8)), [1, 3]);
}

#[test]
fn static_stations_never_move_and_wait_for_their_port() {
    let mut settings = Settings::default();
    settings.apply("static=2:0:0:0:0:8@4").unwrap();
    let mut it = switch(&[1, 2]);
    it.set_statics(&settings);
    assert_eq!(due(&mut it, 1, &frame(8, 7)), [2]);
    it.add(4);
    assert_eq!(due(&mut it, 1, &frame(8, 7)), [4]);
    assert_eq!(due(&mut it, 2, &frame(7, 8)), []);
    assert_eq!(refused(&it, Reason::Lock), 1);
    it.begin(1_000_000_000);
    assert_eq!(due(&mut it, 1, &frame(8, 7)), [4]);
    it.remove(4);
    assert_eq!(due(&mut it, 1, &frame(8, 7)), [2]);
    it.set_statics(&Settings::default());
    assert!(!it.has_rules);
    assert_eq!(due(&mut it, 2, &frame(7, 8)), [1]);
}

#[test]
fn a_storm_is_limited_and_what_is_for_one_is_not() {
    let mut it = ruled(&[(1, "storm=1000/s"), (2, ""), (3, "vlan=5"), (4, "vlan=5")]);
    assert_eq!(due(&mut it, 2, &frame(0xff, 9)), [1]);
    let mut passed = 0;
    for ms in 0..1000_u64 {
        it.begin(ms * 1000);
        for _ in 0..100 {
            passed += due(&mut it, 1, &frame(0xff, 8)).len();
            assert_eq!(due(&mut it, 1, &frame(9, 8)), [2]);
            assert_eq!(due(&mut it, 3, &frame(0xff, 8)), [4], "another VLAN's");
        }
    }
    assert!((1000..=1100).contains(&passed), "{passed}");
    assert_eq!(refused(&it, Reason::Storm), 100_000 - passed as u64);
}

#[test]
fn ports_may_be_deaf_spared_full_or_down() {
    let mut it = ruled(&[
        (1, "learn=no"),
        (2, "flood=no"),
        (3, "stations=1"),
        (4, "link=down"),
    ]);
    assert_eq!(due(&mut it, 1, &frame(9, 8)), [3]);
    assert_eq!(
        due(&mut it, 3, &frame(8, 7)),
        [1],
        "not learned, so flooded, but to 2"
    );
    let mut group = frame(0xff, 8);
    group[0] |= 1;
    assert_eq!(due(&mut it, 1, &group), [2, 3]);
    due(&mut it, 3, &frame(0xff, 6));
    assert_eq!((it.counters.unlearned, it.table.len()), (1, 1));
    assert_eq!(due(&mut it, 4, &frame(0xff, 6)), []);
    assert_eq!(refused(&it, Reason::Down), 1);
    set(&mut it, 4, "");
    group[11] = 5;
    assert_eq!(due(&mut it, 4, &group), [1, 2, 3]);
}

/// A second in which a station is heard at a second port, too, as in a loop.
fn looping(it: &mut Forwarder, second: u64) {
    it.begin(second * 1_000_000);
    for _ in 0..2 * STRAYS {
        due(it, 1, &frame(0xff, 8));
        due(it, 2, &frame(0xff, 8));
    }
}

#[test]
fn a_loop_is_found_and_its_port_shut_if_that_is_wanted() {
    let mut it = switch(&[1, 2, 3]);
    looping(&mut it, 0);
    let found = |is_shut| Loop {
        port: 2,
        station: [2, 0, 0, 0, 0, 8],
        is_shut,
    };
    assert_eq!((it.next_loop(), it.next_loop()), (Some(found(false)), None));
    assert_eq!(due(&mut it, 2, &frame(0xff, 7)), [1, 3]);
    it.loops = Loops::Shut;
    looping(&mut it, 100);
    assert_eq!(it.next_loop(), Some(found(true)));
    assert_eq!(it.is_shut(2), (true, true));
    assert_eq!(due(&mut it, 2, &frame(0xff, 8)), []);
    assert_eq!(due(&mut it, 1, &frame(0xff, 8)), [3]);
    assert!(refused(&it, Reason::Down) > 0);
    it.begin(161_000_000);
    assert_eq!(due(&mut it, 1, &frame(0xff, 8)), [2, 3]);
    assert!(!it.has_rules);
    assert_eq!(it.counters.loops, 2);
    it.loops = Loops::No;
    looping(&mut it, 200);
    assert_eq!((it.next_loop(), it.counters.loops), (None, 2));
}

#[test]
fn a_port_that_is_shut_for_a_loop_is_shut_when_its_owner_comes_again() {
    let mut it = switch(&[1, 2, 3]);
    it.loops = Loops::Shut;
    looping(&mut it, 100);
    for second in [101, 120, 159] {
        it.begin(second * 1_000_000);
        it.remove(2);
        assert_eq!(it.is_shut(2), (false, false));
        it.begin(second * 1_000_000);
        it.add(2);
        it.set(2, &PortSettings::default(), 0);
        it.begin(second * 1_000_000);
        assert_eq!(it.is_shut(2), (true, true), "{second}");
        assert_eq!(due(&mut it, 1, &frame(0xff, 8)), [3]);
    }
    it.begin(160_000_000);
    assert_eq!(due(&mut it, 1, &frame(0xff, 8)), [2, 3]);
    assert!(!it.has_rules && it.shut.is_empty());

    // Its time may be over while nobody has the number.
    looping(&mut it, 200);
    it.remove(2);
    it.begin(261_000_000);
    it.add(2);
    assert_eq!(it.is_shut(2), (false, false));

    // Somebody else's port is not shut for it.
    looping(&mut it, 300);
    it.remove(2);
    it.pardon(2);
    it.add(2);
    assert_eq!(it.is_shut(2), (false, false));
    assert_eq!(due(&mut it, 1, &frame(0xff, 8)), [2, 3]);
    assert!(!it.has_rules);
}

#[test]
fn a_machine_that_moves_and_one_with_two_links_are_no_loops() {
    let mut it = switch(&[1, 2, 3]);
    it.loops = Loops::Shut;
    for second in 0..300_u64 {
        it.begin(second * 1_000_000);
        // It migrates each ten seconds, and says so by some frames; the last of the old place come late.
        let now = 1 + (second / 10 % 2) as Number;
        for nth in 0..200 {
            let from = if nth < 20 { 3 - now } else { now };
            if (second > 0 && second % 10 == 0) || from == now {
                due(&mut it, from, &frame(0xff, 8));
            }
        }
    }
    // Its second link sends as it, as seldom as a bond that is probed.
    for second in 300..400_u64 {
        it.begin(second * 1_000_000);
        for _ in 0..50 {
            due(&mut it, 1, &frame(0xff, 8));
            due(&mut it, 2, &frame(0xff, 8));
        }
    }
    assert_eq!((it.counters.loops, it.has_rules), (0, false));
    assert!(it.counters.moves > 10);
}

#[test]
fn a_million_strangers_of_one_port_make_nobody_forgotten() {
    let mut it = ruled(&[(1, "stations=100"), (2, "vlan=0"), (3, "")]);
    due(&mut it, 2, &frame(0xff, 7));
    let mut sent = frame(0xff, 8);
    for number in 0..1_000_000_u32 {
        sent[8..12].copy_from_slice(&number.to_be_bytes());
        sent[7] = 1;
        it.decide(1, (&sent, sent.len()), None);
    }
    assert_eq!((it.table.len(), it.counters.unlearned), (101, 999_900));
    assert_eq!(due(&mut it, 3, &frame(7, 6)), [2]);
}
