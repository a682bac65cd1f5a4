"""The part of tests/monitoring/run that reads: INFO turnstile, the exporter's page, the dashboard, and
what Prometheus makes of them. Arguments like rejected=2 are figures that the server must have."""

import argparse
import decimal
import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

DASHBOARD = pathlib.Path(__file__).parents[2] / "client-examples/monitoring/grafana-dashboard.json"
PATIENCE_S = 10  # for Prometheus, which scrapes and judges each second
MOVING = {"turnstile_clock_lead_ms"}  # changes between a look and the next
ALERTS = {"TurnstileContention", "TurnstileStaleTouches", "TurnstileHoldsExpired", "TurnstileWaitLimit",
          "TurnstileLocksEvicted", "TurnstileClockLead"}
OF_PROMETHEUS = {"instance", "job"}  # labels that the exporter does not know
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool",
         "offset", "inf", "nan"}

problems = []


def check(good, message):
    if not good:
        problems.append(message)


def get(port, path, **parameters):
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(parameters)}"
    # A proxy from the environment has no business here.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as reply:
        return reply.read().decode()


def ask(port, path, **parameters):
    return json.loads(get(port, f"/api/v1/{path}", **parameters))["data"]


def info(port):
    """The fields of INFO turnstile that are numbers."""
    text = subprocess.run(["redis-cli", "-p", str(port), "INFO", "turnstile"],
                          check=True, capture_output=True, text=True, timeout=10).stdout
    return {name: decimal.Decimal(value)
            for name, value in re.findall(r"^(turnstile_\w+):(-?[\d.]+)\s*$", text, re.MULTILINE)}


def scrape(port):
    """The exporter's page: a list of (metric, labels, value)."""
    return [(metric, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")), decimal.Decimal(value))
            for metric, labels, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$",
                                                    get(port, "/metrics"), re.MULTILINE)]


def alternatives(pattern):
    """turnstile_(a|b) as [turnstile_a, turnstile_b]: each must exist, not just one of them."""
    group = re.search(r"\(([^()]*)\)", pattern)
    if not group:
        return pattern.split("|")
    return [whole for each in group[1].split("|")
            for whole in alternatives(pattern[:group.start()] + each + pattern[group.end():])]


def check_names(where, expression, series):
    """Whether every metric in a PromQL expression, with each label it asks for, was scraped."""
    found = 0

    def selector(match):
        nonlocal found
        found += 1
        metric, matchers = match.groups()
        wanted = [(label, [re.escape(value)] if operator == "=" else alternatives(value))
                  for label, operator, value in re.findall(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"', matchers)
                  if label not in OF_PROMETHEUS and operator in ("=", "=~")]
        check(any(name == metric for name, _, _ in series), f"{where}: nobody exports {metric}")
        for label, patterns in wanted:
            for pattern in patterns:
                check(any(name == metric and re.fullmatch(pattern, labels.get(label, ""))
                          for name, labels, _ in series),
                      f'{where}: nobody exports {metric}{{{label}="{pattern}"}}')
        return " "

    rest = re.sub(r"([A-Za-z_:][\w:]*)\s*\{([^}]*)\}", selector, expression)
    rest = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", rest)
    rest = re.sub(r"\[[^\]]*\]", " ", rest)
    for name in re.findall(r"(?<![\w.])([A-Za-z_:][\w:]*)(?!\s*\(|\w)", rest):
        if name.lower() not in WORDS:
            found += 1
            check(any(name == metric for metric, _, _ in series), f"{where}: nobody exports {name}")
    check(found > 0, f"{where}: no metric in {expression}")


def check_figures(options):
    """Every number of INFO turnstile is on the exporter's page, with its value. Returns the page."""
    before = info(options.server_port)
    series = scrape(options.exporter_port)
    after = info(options.server_port)
    exported = {labels["key"]: value for metric, labels, value in series if metric == "redis_script_values"}
    check(exported.keys() == before.keys(),
          f"in one of INFO and the export only: {sorted(exported.keys() ^ before.keys())}")
    for name in exported.keys() & before.keys():
        low, high = sorted((before[name], after[name]))
        check(low == high or name in MOVING, f"{name} moved from {before[name]} to {after[name]}")
        check(low <= exported[name] <= high, f"{name} is {before[name]}, exported as {exported[name]}")
    for name, value in (figure.split("=") for figure in options.figures):
        check(before.get(f"turnstile_{name}") == int(value),
              f"{name} is {before.get(f'turnstile_{name}')} and should be {value}")
    errors = [value for metric, _, value in series if metric == "redis_exporter_last_scrape_error"]
    check(errors == [0], f"redis_exporter_last_scrape_error: {errors}")
    print(f"{len(exported)} figures")
    return series


def check_dashboard(options, series):
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    identities = [panel["id"] for panel in dashboard["panels"]]
    check(len(identities) == len(set(identities)), "two panels have one id")
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    query = variables["instance"]["query"]["query"]
    selector = re.fullmatch(r"label_values\((.*), instance\)", query)
    check(selector, f"the variable instance: {query}")
    questions = [("the variable instance", selector[1])] if selector else []
    for panel in panels:
        for target in panel["targets"]:
            where = f"panel {panel['title']}, {target['refId']}"
            check(panel["datasource"]["uid"] == target["datasource"]["uid"] == "${datasource}",
                  f"{where}: the data source is not the variable")
            check('instance=~"$instance"' in target["expr"], f"{where}: not for $instance")
            questions.append((where, target["expr"]))
    deadline = time.monotonic() + PATIENCE_S
    for where, question in questions:
        check_names(where, question, series)
        question = question.replace("$__rate_interval", "1m").replace("$instance", ".*")
        check("$" not in question, f"{where}: an unknown variable in {question}")
        # A rate has an answer only after the second scrape.
        try:
            answered = eventually(
                lambda: ask(options.prometheus_port, "query", query=question)["result"], deadline)
            check(answered, f"{where}: Prometheus has no answer to {question}")
        except urllib.error.HTTPError as error:
            check(False, f"{where}: {json.loads(error.read())['error']}")
    print(f"{len(panels)} panels, {len(questions)} questions")


def eventually(condition, deadline):
    """Asks until the answer is yes, and returns it; at the deadline, what it was then."""
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def check_alerts(options, series):
    def rules_now():
        groups = ask(options.prometheus_port, "rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules_now()), time.monotonic() + PATIENCE_S)
    rules = rules_now()
    check({rule["name"] for rule in rules} == ALERTS, f"alerts: {[rule['name'] for rule in rules]}")
    for rule in rules:
        check(rule["health"] == "ok", f"alert {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
        check_names(f"alert {rule['name']}", rule["query"], series)
    print(f"{len(rules)} alerts")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("server", "exporter", "prometheus"):
        parser.add_argument(f"--{name}-port", type=int, required=True)
    parser.add_argument("figures", nargs="*")
    options = parser.parse_args()
    series = check_figures(options)
    check_dashboard(options, series)
    check_alerts(options, series)
    for problem in problems:
        print(f"monitoring: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
