//! The demo's report: what a person reads, what a program reads, the picture.

use std::time::Duration;

use vnplug_e2e::demo::{Run, Traffic, Via, sentences, svg, table, to_json};

fn runs() -> Vec<Run> {
    let run = |via, traffic, offered, captured, cpu_ms| Run {
        guest: "uml".to_owned(),
        via,
        traffic,
        offered,
        captured,
        elapsed: Duration::from_secs(2),
        host_cpu: Duration::from_millis(cpu_ms),
    };
    vec![
        run(Via::Nic, Traffic::Real, 1_000, 990, 20),
        run(Via::Nic, Traffic::Small, 2_000_000, 500_000, 2_000),
        run(Via::Vnplug, Traffic::Real, 1_010, 1_010, 10),
        run(Via::Vnplug, Traffic::Small, 2_000_000, 2_000_000, 1_000),
    ]
}

#[test]
fn the_file_for_programs_has_every_run_with_its_losses() {
    let json = to_json(&runs(), &["a note".to_owned()]);
    let small = &json["runs"][1];
    let text = |name: &str| small[name].as_str().unwrap().to_owned();
    let number = |name: &str| small[name].as_f64().unwrap();
    assert_eq!(
        [text("guest"), text("via"), text("traffic")],
        ["uml", "nic", "small"]
    );
    assert_eq!((number("offered"), number("captured")), (2e6, 5e5));
    assert_eq!((number("lost"), number("lost_pct")), (1.5e6, 75.0));
    assert_eq!((number("pps"), number("host_cpu_s")), (1e6, 2.0));
    assert_eq!(json["runs"].as_array().unwrap().len(), 4);
    assert_eq!(json["notes"][0], "a note");
}

#[test]
fn the_table_puts_both_ways_of_a_load_below_each_other() {
    let table = table(&runs());
    let rows: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .filter(|words: &Vec<&str>| !words.is_empty())
        .collect();
    let ways: Vec<&[&str]> = rows[1..].iter().map(|row| &row[1..3]).collect();
    assert_eq!(
        ways,
        [
            ["real", "nic"],
            ["real", "vnplug"],
            ["small", "nic"],
            ["small", "vnplug"]
        ]
    );
    let small = [
        "uml",
        "small",
        "nic",
        "2,000,000",
        "500,000",
        "1,500,000",
        "75.00",
    ];
    assert_eq!(rows[3][..7], small);
    assert_eq!(rows[3][7..], ["1,000,000", "2.00", "4.00"]);
}

#[test]
fn one_sentence_for_each_guest_compares_loss_and_cost() {
    let sentences = sentences(&runs());
    assert_eq!(sentences.len(), 1);
    for part in ["75.0 %", "vNPlug 0 (0.00 %)", "8.0 times less"] {
        assert!(sentences[0].contains(part), "{part}: {}", sentences[0]);
    }
}

#[test]
fn the_picture_has_a_bar_for_each_run_and_all_its_tags_closed() {
    let svg = svg(&runs());
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(
        svg.matches("<text ").count(),
        svg.matches("</text>").count()
    );
    // The background, two in the legend, and two for each run: captured and lost.
    assert_eq!(svg.matches("<rect ").count(), 3 + 2 * 4);
    assert!(svg.contains("1,500,000 lost, 75.0 %") && svg.contains("0 lost"));
}
