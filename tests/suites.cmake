# Read by CTest when it starts: registers each GoogleTest suite of SUITES_EXECUTABLE as one test, so
# that a suite is one process. Whoever includes it sets
#
#   SUITES_EXECUTABLE   the program
#   SUITES_LABEL        the label, which is also what the names of the tests begin with
#   SUITES_PROPERTIES   further properties of the tests
#   SUITES_SLOW         a regular expression: the suites that begin first
#   SUITES_QUICK        another: those that also have the label "quick", unless they are slow
#
# Suites named *Long have the label "long" instead: script/test leaves them to script/test --all.
# GTEST_FILTER in the environment narrows the choice to single tests, as it does without CTest.

if(NOT EXISTS "${SUITES_EXECUTABLE}")
  add_test("${SUITES_LABEL}.not_built" "${SUITES_EXECUTABLE}")
  set_tests_properties("${SUITES_LABEL}.not_built" PROPERTIES LABELS "${SUITES_LABEL}")
  return()
endif()

execute_process(COMMAND "${SUITES_EXECUTABLE}" --gtest_list_tests
  OUTPUT_VARIABLE listing RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${SUITES_EXECUTABLE} --gtest_list_tests: ${result}")
endif()

# A line that is not indented names a suite, with a dot behind it; the others name its tests.
string(REGEX REPLACE "[ \t]*#[^\n]*" "" listing "${listing}")
string(REPLACE "\n" ";" lines "${listing}")
set(suites)
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ]+)\\.$")
    set(suite "${CMAKE_MATCH_1}")
    string(MAKE_C_IDENTIFIER "${suite}" id)
    list(APPEND suites "${suite}")
    set(tests_${id})
  elseif(line MATCHES "^  ([^ ]+)$")
    list(APPEND tests_${id} "${suite}.${CMAKE_MATCH_1}")
  endif()
endforeach()

foreach(suite IN LISTS suites)
  string(MAKE_C_IDENTIFIER "${suite}" id)
  list(LENGTH tests_${id} count)
  if(count EQUAL 0)
    continue()
  endif()
  if("$ENV{GTEST_FILTER}" STREQUAL "")
    set(filter "${suite}.*")
  else()
    list(JOIN tests_${id} ":" filter)
  endif()
  set(cost ${count})
  set(timeout 600)
  set(labels "${SUITES_LABEL}")
  if(suite MATCHES "Long$")
    set(timeout 1800)
    set(labels long)
  elseif(suite MATCHES "${SUITES_SLOW}")
    set(cost 1000)
  elseif(suite MATCHES "${SUITES_QUICK}")
    list(APPEND labels quick)
  endif()
  set(name "${SUITES_LABEL}.${suite}")
  add_test("${name}" "${SUITES_EXECUTABLE}" "--gtest_filter=${filter}")
  set_tests_properties("${name}" PROPERTIES
    LABELS "${labels}" TIMEOUT ${timeout} COST ${cost} ${SUITES_PROPERTIES})
  unset(tests_${id})
endforeach()
