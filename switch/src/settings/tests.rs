//! What is read is said again, and what is wrong is named.

use super::*;

#[test]
fn what_is_set_is_said_again() {
    for text in [
        "vlan=10",
        "trunk=1-10+20 native=5 isolated=yes",
        "trunk=20+22+30-32",
        "lock=02:00:00:00:00:01+02:00:00:00:00:02 stations=3",
        "lock=first storm=1000/s learn=no flood=no",
        "storm=no",
        "police=8000000",
        "delay=20000us jitter=500us reorder=yes loss=0.5% rate=10000000 seed=7",
        "link=down",
        "gro=20 acks=expand",
        "tso=off csum=off",
        "",
    ] {
        let mut port = PortSettings::default();
        port.apply(text).unwrap();
        assert_eq!(port.to_string(), text);
        let mut again = PortSettings::default();
        again.apply(&port.to_string()).unwrap();
        assert_eq!(again, port);
        port.apply("default").unwrap();
        assert_eq!(port, PortSettings::default());
    }
}

#[test]
fn people_may_write_as_they_like() {
    let mut port = PortSettings::default();
    port.apply("delay=20ms,rate=10Mbit/s loss=1 storm=5")
        .unwrap();
    assert_eq!(
        port.to_string(),
        "storm=5/s delay=20000us loss=1% rate=10000000"
    );
    port.apply("default trunk=all vlan=7").unwrap();
    assert_eq!(port.to_string(), "trunk=1-4094 native=7");
    port.apply("trunk=no vlan=0 gro=off").unwrap();
    assert!(port.is_transparent());
}

#[test]
fn a_trunk_and_its_native_vlan_are_said_in_any_order() {
    for text in ["trunk=10 native=0", "native=0 trunk=10", "vlan=0,trunk=10"] {
        let mut port = PortSettings::default();
        port.apply(text).unwrap();
        assert_eq!(port.to_string(), "trunk=10 native=0", "{text}");
    }
    let mut all = Settings::default();
    for key in ["port.4.native", "default.native"] {
        all.set(key, "0").unwrap();
    }
    all.set("port.4.trunk", "10").unwrap();
    all.settle();
    assert_eq!(all.ports[&4].to_string(), "trunk=10 native=0");
    assert_eq!(all.default, PortSettings::default());
}

#[test]
fn what_is_wrong_is_named_and_sets_nothing() {
    for (text, part) in [
        ("colour=red", "there are vlan=ID"),
        ("vlan", "KEY=VALUE"),
        ("vlan=4095", "1 to 4094"),
        ("trunk=5-3", "1+5-9"),
        ("trunk=0", "from 1"),
        ("lock=01:00:00:00:00:00", "no station's address"),
        ("lock=2:0:0:0:0", "no station's address"),
        ("storm=x", "frames a second"),
        ("delay=20", "20ms"),
        ("delay=11s", "up to 10s"),
        ("loss=101%", "percentage"),
        ("rate=5", "at least 1K"),
        ("link=left", "up or down"),
        ("isolated=maybe", "yes or no"),
        ("tso=no", "on or off"),
        ("gro=45", "from 1 to 44"),
        ("gro=-1", "from 1 to 44"),
        ("gro=yes", "or off"),
        ("acks=all", "as-is or expand"),
    ] {
        let mut port = PortSettings::default();
        let error = port.apply(&format!("vlan=3 {text}")).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
        assert_eq!(port, PortSettings::default());
    }
}

#[test]
fn a_switch_has_defaults_ports_and_stations() {
    let mut all = Settings::default();
    all.apply("hub=yes age=60 storm=100/s loops=shut default.isolated=yes port.3.vlan=10")
        .unwrap();
    all.apply("static=02:00:00:00:00:01@3/10+2-0-0-0-0-2@4")
        .unwrap();
    assert_eq!(all.of(3).to_string(), "vlan=10");
    assert_eq!(all.of(4).to_string(), "isolated=yes");
    let mut again = Settings::default();
    again.apply(&all.to_string()).unwrap();
    assert_eq!(again, all);
    all.apply("static=02:00:00:00:00:01@no/10").unwrap();
    assert_eq!(all.statics.len(), 1);
    for (text, part) in [
        ("colour=red", "there are hub=yes"),
        ("port.20000.vlan=3", "to 16384"),
        ("static=2:0:0:0:0:1", "MAC@PORT"),
        ("static=2:0:0:0:0:1@0", "MAC@PORT"),
        ("loops=maybe", "no or log or shut"),
    ] {
        let error = all.apply(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn one_segment_is_merged_with_none() {
    for (text, segments) in [("off", 0), ("0", 0), ("1", 0), ("2", 2), ("44", 44)] {
        assert_eq!(super::values::segments("gro", text), Ok(segments), "{text}");
    }
}
